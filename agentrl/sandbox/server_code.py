"""The exec server's code for sandboxes: one file, compiled once per image, because compilation would add 8 ms to each start.

Only the image's interpreter can compile code in the form that it loads. So the first sandbox of an image starts from source and compiles it
before any agent's program runs. The host stores the compiled bytes and mounts them into sandboxes, but never loads them.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from agentrl.base.files import replace_file
from agentrl.base.scratch import ScratchFolder
from agentrl.errors import SandboxError
from agentrl.protocols import Sandbox
from agentrl.sandbox import inside
from agentrl.sandbox.images import Image

FOLDER = Path(inside.__file__).parent
MODULES = ("wire", "users", "child", "files", "program", "snapshot", "spawn", "isolation", "keeper", "server")
"""The modules of the exec server. Each comes after the modules that it imports."""
_IMPORT = re.compile(r"^( *)from (?:__future__|agentrl\.sandbox\.inside\.\w+) import (?:\([^)]*\)|.*)$", re.MULTILINE)
_MAX_BYTES = 1 << 20
_COMPILE_S = 60.0
_COMPILE = (
    "import base64, importlib.util, marshal\n"
    "code = compile(open('/agentrl/exec_server.py', 'rb').read(), '/agentrl/exec_server.py', 'exec', dont_inherit=True)\n"
    "print(base64.b64encode(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)).decode())\n"
)


@functools.cache
def source() -> str:
    """Returns the exec server as one module: its modules in order, without their imports from each other."""
    texts = ((FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
    return "from __future__ import annotations\n" + "\n\n".join(_IMPORT.sub(r"\1pass", text) for text in texts)


def ensure_source(image: Image) -> Path:
    """Returns the path of the exec server's source, `<image.folder>/exec_server-<hash of source>.py`. Writes the file if it is missing."""
    path = _path(image, ".py")
    if not path.exists():
        _write(path, source().encode())
    return path


async def ensure_compiled(image: Image, open_from_source: Callable[[], Awaitable[Sandbox]]) -> Path:
    """Returns the path of the exec server compiled by the image's interpreter, `<image.folder>/exec_server-<hash of source>.pyc`.

    If the file is missing, compiles the exec server in the sandbox that `open_from_source` opens. Raises the errors of `open_from_source`,
    and `SandboxError` if the interpreter cannot compile the code.
    """
    path = _path(image, ".pyc")
    if not path.exists():
        sandbox = await open_from_source()
        try:
            result = await sandbox.python(_COMPILE, timeout_s=_COMPILE_S, output_bytes=_MAX_BYTES)
        finally:
            await sandbox.close()
        if not result.ok or result.truncated:
            raise SandboxError(f"the interpreter of image {image.name} cannot compile the exec server: {result.stderr[-500:]}")
        _write(path, base64.b64decode(result.stdout))
    return path


@contextlib.contextmanager
def as_file(program: bytes) -> Iterator[Path]:
    """Writes a replacement for the exec server to a file that exists during the block and that every user can read. Yields its path."""
    with ScratchFolder() as folder:
        path = folder / "exec_server.py"
        path.write_bytes(program)
        path.chmod(0o644)
        folder.chmod(0o755)
        yield path


def _path(image: Image, suffix: str) -> Path:
    return image.folder / f"exec_server-{hashlib.sha256(source().encode()).hexdigest()[:16]}{suffix}"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path, tag=str(os.getpid())) as part:
        part.write_bytes(data)
        part.chmod(0o644)
