"""The exec server's code as it is handed to sandboxes: compiled once for each image, because compiling it costs every start 8 ms.

Only the image's own interpreter can compile for itself, so the first sandbox of an image starts from source and compiles it,
before any agent's program could have been near. The host stores those bytes and mounts them; it never loads them.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.protocols import Sandbox
from agentrl.sandbox import exec_server
from agentrl.sandbox.images import Image

SOURCE = Path(exec_server.__file__)
MAX_BYTES = 1 << 20
COMPILE_S = 60.0
_COMPILE = (
    "import base64, importlib.util, marshal\n"
    "code = compile(open('/agentrl/exec_server.py', 'rb').read(), '/agentrl/exec_server.py', 'exec', dont_inherit=True)\n"
    "print(base64.b64encode(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)).decode())\n"
)


async def compiled(image: Image, open_from_source: Callable[[], Awaitable[Sandbox]]) -> Path:
    """Path of the exec server compiled by the image's interpreter: `<image folder>/exec_server-<hash of source>.pyc`."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = image.folder / f"exec_server-{key}.pyc"
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


def _place(path: Path, data: bytes) -> None:
    """Written beside and renamed, so that no one sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_bytes(data)
    beside.chmod(0o644)
    beside.rename(path)
