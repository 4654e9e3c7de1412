"""Compiles the .proto files when the package is built or installed from a checkout, by protoc of grpcio-tools.

Their descriptors become one file beside them, which is read as it is by every Python and every protobuf. It is not part
of the repository. Called by hatchling (pyproject.toml).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "edge_runtime/wire"
COMPILED = f"{FOLDER}/protocols.binpb"


def compile_protocols(root: Path, target: Path) -> None:
    """Write the descriptors of all .proto files of the package to a file. Raises ImportError without grpcio-tools."""
    from grpc_tools import protoc

    files = sorted(each.name for each in (root / FOLDER).glob("*.proto"))
    part = target.with_suffix(".part")
    status = protoc.main(["protoc", f"-I{root / FOLDER}", f"--descriptor_set_out={part}", *files])
    if status:
        raise RuntimeError(f"protoc ended with status {status}")
    part.replace(target)


class CompileProtocols(BuildHookInterface):
    """Called by hatchling before it packs a wheel or makes an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; an editable install without grpcio-tools goes without the gRPC door."""
        try:
            compile_protocols(Path(self.root), Path(self.root, COMPILED))
        except ImportError as error:
            if version != "editable":
                raise
            self.app.display_warning(f"no {COMPILED}, which the gRPC door needs: {error}")
            return
        build_data["artifacts"].append(f"/{COMPILED}")
