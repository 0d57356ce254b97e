"""The exec server's code for sandboxes: one file, compiled once per image, because compilation would cost each start 8 ms.

Only the image's own interpreter can compile for itself. So the first sandbox of an image starts from source and compiles it, before any
agent's program runs. The host stores the compiled bytes and mounts them; it never loads them.
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
_MAX_BYTES = 1 << 20
_COMPILE_S = 60.0
_COMPILE = (
    "import base64, importlib.util, marshal\n"
    "code = compile(open('/agentrl/exec_server.py', 'rb').read(), '/agentrl/exec_server.py', 'exec', dont_inherit=True)\n"
    "print(base64.b64encode(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)).decode())\n"
)


def module_trees(name: str = ENTRY_MODULE) -> dict[str, ast.Module]:
    """The exec server's module `name` and those it imports, each after the ones that it depends on."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    modules: dict[str, ast.Module] = {}
    for node in internal_imports(tree.body):
        modules |= module_trees(str(node.module).removeprefix(f"{inside.__name__}."))
    return {**modules, name: tree}


def internal_imports(nodes: Iterable[ast.AST]) -> Iterator[ast.ImportFrom]:
    """The nodes that import from other modules of the exec server. At run time only those at the top of a module count."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{inside.__name__}."):
            yield node


@functools.cache
def source() -> str:
    """The exec server as one module: its modules in order, without their imports from each other."""
    return "from __future__ import annotations\n" + "\n\n".join(_joinable(name, tree) for name, tree in module_trees().items())


def _joinable(name: str, tree: ast.Module) -> str:
    """The source of a module, with `pass` instead of the imports that joining makes unnecessary."""
    lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    for node in (*futures, *internal_imports(ast.walk(tree))):
        lines[node.lineno - 1] = " " * node.col_offset + "pass"
        for number in range(node.lineno, node.end_lineno or node.lineno):
            lines[number] = ""
    return "\n".join(lines) + "\n"


def as_source(image: Image) -> Path:
    """Path of the exec server as source, `<image.folder>/exec_server-<hash of source>.py`. Writes it if it is missing."""
    path = _path(image, ".py")
    if not path.exists():
        _write(path, source().encode())
    return path


async def compiled(image: Image, open_from_source: Callable[[], Awaitable[Sandbox]]) -> Path:
    """Path of the exec server compiled by the image's interpreter, `<image.folder>/exec_server-<hash of source>.pyc`.

    If it is missing, it is compiled in the sandbox that `open_from_source` opens.
    """
    path = _path(image, ".pyc")
    if not path.exists():
        sandbox = await open_from_source()
        try:
            result = await sandbox.python(_COMPILE, timeout_s=_COMPILE_S, output_bytes=_MAX_BYTES)
        finally:
            await sandbox.close()
        if not result.ok or result.truncated:
            raise SandboxError(f"the image {image.name} cannot compile the exec server: {result.stderr[-500:]}")
        _write(path, base64.b64decode(result.stdout, validate=False))
    return path


def _path(image: Image, suffix: str) -> Path:
    return image.folder / f"exec_server-{hashlib.sha256(source().encode()).hexdigest()[:16]}{suffix}"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path, tag=str(os.getpid())) as part:
        part.write_bytes(data)
        part.chmod(0o644)
