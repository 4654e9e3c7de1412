"""The TUF client by hand: `python -m edge_runtime.updates.tuf_cli`, in the form that TUF's conformance suite drives.

Owns: flags, the layout of the two folders, exit status: 0, and exactly 1 for every failure. It uses the client, store
and downloader of the daemon's updater, without the floor under the clock. Commands:

    --metadata-dir D init ROOT                                    trust a root file; fetches nothing
    --metadata-url U --metadata-dir D refresh                     bring the metadata in D up to date
    --metadata-url U --metadata-dir D --target-name P --target-dir T --target-base-url B download
                                                                  the same, then the artifact P (may be said again) to T

U and B: https://..., http://... of this host, or a folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from edge_runtime.durable import make_folder
from edge_runtime.errors import EdgeRuntimeError, TrustError
from edge_runtime.updates.download import is_whole
from edge_runtime.updates.fetch import Fetcher, FetchLimits, FolderFetcher, Pace
from edge_runtime.updates.http_fetch import HttpFetcher
from edge_runtime.updates.store import ArtifactStore, MetadataStore, place, target_file
from edge_runtime.updates.trust import TrustedSet, update_start
from edge_runtime.updates.tuf_client import Bounds, TufClient

ARTIFACT_LIMITS = FetchLimits(total_s=6 * 3600.0)
"""For one artifact: 4 GiB in this time is 200 kB/s. A person at a terminal can stop it and resume later."""

NEEDED = {
    "init": (),
    "refresh": ("metadata_url",),
    "download": ("metadata_url", "target_name", "target_dir", "target_base_url"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` as in sys.argv[1:]. Returns the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    missing = [flag for flag in NEEDED[given.command] if not getattr(given, flag)]
    if missing:
        parser.error(f"{given.command} also needs --" + ", --".join(missing).replace("_", "-"))
    store = MetadataStore(given.metadata_dir)
    try:
        with store.lock():
            if given.command == "init":
                _init(store, given.trusted_root)
            else:
                client = TufClient(_fetcher(given.metadata_url), store, now_utc=update_start())
                client.refresh()
                if given.command == "download":
                    _download(client, given)
    except (EdgeRuntimeError, OSError) as error:
        sys.stderr.write(f"{given.command}: {error}\n")
        return 1
    return 0


def _init(store: MetadataStore, root: Path) -> None:
    data = root.read_bytes()
    if len(data) > Bounds().root_bytes:
        raise TrustError(f"{root}: got {len(data)} bytes, wanted at most {Bounds().root_bytes}")
    TrustedSet(data, update_start())
    store.save("root", data)


def _download(client: TufClient, given: argparse.Namespace) -> None:
    fetcher = _fetcher(given.target_base_url)
    make_folder(given.target_dir)
    # Beside the metadata, not in T: no partial file may appear there. Parts stay, for the next try.
    artifacts = ArtifactStore(given.metadata_dir / "artifacts")
    for name in given.target_name:
        signed = client.look_up(name)
        if signed is None:
            raise TrustError(f"{name}: no role that may speak of it names it; look at the spelling")
        file = target_file(given.target_dir, name)
        if is_whole(file, signed.expected):
            continue
        blob = artifacts.fetch(fetcher, signed.path, signed.expected, pace=Pace(ARTIFACT_LIMITS))
        place(blob, file)
        blob.unlink()


def _fetcher(address: str) -> Fetcher:
    return HttpFetcher(address) if "://" in address else FolderFetcher(Path(address))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 1; argparse itself would exit with 2."""
        self.print_usage(sys.stderr)
        self.exit(1, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m edge_runtime.updates.tuf_cli", description="A TUF client.", allow_abbrev=False)
    parser.add_argument("--metadata-dir", type=Path, required=True, metavar="D", help="trusted metadata")
    parser.add_argument("--metadata-url", metavar="U", help="the repository's metadata: an address, or a folder")
    parser.add_argument("--target-name", action="append", metavar="P", help="a target's path; may be said again")
    parser.add_argument("--target-dir", type=Path, metavar="T", help="where artifacts go")
    parser.add_argument("--target-base-url", metavar="B", help="the repository's artifacts: an address, or a folder")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("init").add_argument("trusted_root", type=Path, metavar="ROOT")
    commands.add_parser("refresh")
    commands.add_parser("download")
    return parser


if __name__ == "__main__":
    sys.exit(main())
