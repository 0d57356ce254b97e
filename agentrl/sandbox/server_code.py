"""The exec server's code as it is handed to sandboxes: one file, compiled once for each image, because compiling costs every start 8 ms.

Only the image's own interpreter can compile for itself, so the first sandbox of an image starts from source and compiles it,
before any agent's program could have been near. The host stores those bytes and mounts them; it never loads them.
"""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

from agentrl.base.files import replace_file
from agentrl.errors import SandboxError
from agentrl.protocols import Sandbox
from agentrl.sandbox import inside
from agentrl.sandbox.images import Image

FOLDER = Path(inside.__file__).parent
ENTRY_MODULE = "main"
MAX_BYTES = 1 << 20
COMPILE_S = 60.0
_COMPILE = (
    "import base64, importlib.util, marshal\n"
    "code = compile(open('/agentrl/exec_server.py', 'rb').read(), '/agentrl/exec_server.py', 'exec', dont_inherit=True)\n"
    "print(base64.b64encode(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)).decode())\n"
)


def module_trees(name: str = ENTRY_MODULE) -> dict[str, ast.Module]:
    """The modules of the exec server that `name` needs, itself included, each after those that it imports from."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    found: dict[str, ast.Module] = {}
    for node in internal_imports(tree.body):
        found |= module_trees(str(node.module).removeprefix(f"{inside.__name__}."))
    return {**found, name: tree}


def internal_imports(nodes: Iterable[ast.AST]) -> Iterator[ast.ImportFrom]:
    """Those of `nodes` that import from other modules of the exec server. At the top of a module stand those it runs with."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{inside.__name__}."):
            yield node


@functools.cache
def source() -> str:
    """The exec server as one module: its modules one after the other, without what they import from each other."""
    return "from __future__ import annotations\n" + "\n\n".join(_joinable(name, tree) for name, tree in module_trees().items())


def _joinable(name: str, tree: ast.Module) -> str:
    """The source of a module with `pass` in the place of imports that its neighbours in the file make needless."""
    lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    for node in (*futures, *internal_imports(ast.walk(tree))):
        lines[node.lineno - 1] = " " * node.col_offset + "pass"
        for number in range(node.lineno, node.end_lineno or node.lineno):
            lines[number] = ""
    return "\n".join(lines) + "\n"


def as_source(image: Image) -> Path:
    """Path of the exec server as source: `<image.folder>/exec_server-<hash of source>.py`."""
    path = _path(image, ".py")
    if not path.exists():
        _place(path, source().encode())
    return path


async def compiled(image: Image, open_from_source: Callable[[], Awaitable[Sandbox]]) -> Path:
    """Path of the exec server compiled by the image's interpreter: `<image.folder>/exec_server-<hash of source>.pyc`."""
    path = _path(image, ".pyc")
    if not path.exists():
        sandbox = await open_from_source()
        try:
            result = await sandbox.python(_COMPILE, timeout_s=COMPILE_S, output_bytes=MAX_BYTES)
        finally:
            await sandbox.close()
        if not result.ok or result.truncated:
            raise SandboxError(f"the image {image.name} cannot compile the exec server: {result.stderr[-500:]}")
        _place(path, base64.b64decode(result.stdout, validate=False))
    return path


def _path(image: Image, suffix: str) -> Path:
    return image.folder / f"exec_server-{hashlib.sha256(source().encode()).hexdigest()[:16]}{suffix}"


def _place(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path, tag=str(os.getpid())) as part:
        part.write_bytes(data)
        part.chmod(0o644)
