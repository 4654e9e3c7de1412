"""Bytecode for a read-only root: without it every start would compile all imported modules.

Architectures share bytecode, so the image's amd64 Python compiles for all of them, run by its own loader and C library;
this machine's Python plays no part, and nothing is emulated.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from cross.tree import Tree

COMPILE = """
import py_compile, sys
for line in sys.stdin:
    path = line.rstrip("\\n")
    try:
        py_compile.compile(path, dfile="/" + path, doraise=True,
                           invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    except (py_compile.PyCompileError, UnicodeError):
        pass  # a template or an example; importing it reports the error
"""


def compile_all(sources: Tree, amd64_root: Tree) -> Tree:
    """`__pycache__` for each .py of `sources`.

    amd64_root: Debian's files of an amd64 image. One process, sorted relative paths and a fixed hash seed give the same
    bytes each time.
    """
    paths = [path for path, entry in sources if path.endswith(".py") and entry.data is not None]
    compiled = Tree()
    with tempfile.TemporaryDirectory() as temporary:
        root, work = Path(temporary, "root"), Path(temporary, "work")
        root.mkdir()
        work.mkdir()
        amd64_root.write(root)
        only = Tree()
        for path in paths:
            only.file(path, sources.read(path))
        only.write(work)
        libraries = root / "usr/lib/x86_64-linux-gnu"
        subprocess.run(
            [libraries / "ld-linux-x86-64.so.2", "--library-path", libraries, root / "usr/bin/python3.13", "-S", "-B",
             "-s", "-P", "-c", COMPILE],
            input="\n".join(paths), text=True, cwd=work, check=True,
            env={"PYTHONHOME": str(root / "usr"), "PYTHONHASHSEED": "0"},
        )  # fmt: skip
        for file in sorted(work.rglob("*.pyc")):
            compiled.file(file.relative_to(work).as_posix(), file.read_bytes())
    return compiled
