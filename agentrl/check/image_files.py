"""The files of an image that an agent can read, without those of its Linux distribution, copied to the host to be searched there.

The truth stays on the host, so nothing is searched for inside the sandbox. Its answers are bounded data.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, field

from agentrl.errors import SandboxError
from agentrl.protocols import SandboxBackend
from agentrl.records import SandboxSpec

PAGE_BYTES = 1 << 20
PAGES = 24
FILE_BYTES = 256 << 10
"""Bytes searched of each file."""
PAGE_S = 60.0

# Prints a page of files as JSON, and where the next page begins. Leaves out files of Debian packages, and Python's own folders.
_PAGE = """
import base64, glob, json, os, sys
owned = set()
for path in glob.glob("/var/lib/dpkg/info/*.list"):
    with open(path, errors="replace") as file:
        owned.update(line.rstrip("\\n") for line in file)
skip = {"/proc", "/sys", "/dev", "/run", "/opt/agentrl", "/var/lib/dpkg", "/var/cache", "/var/log", "/usr/share/doc", "/usr/share/locale"}
if not owned:
    skip |= {"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/var"}
seen, size, files, big, more = 0, 0, {}, 0, None
def walk(top):
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(n for n in folders if os.path.join(folder, n) not in skip
                            and n not in ("__pycache__", "site-packages", "dist-packages", ".git/objects"))
        yield from (os.path.join(folder, name) for name in sorted(names))
for path in walk("/"):
    merged = path[4:] if path.startswith("/usr/") else path
    if path in owned or merged in owned or path.endswith(".pyc") or os.path.islink(path) or not os.path.isfile(path):
        continue
    seen += 1
    if seen <= %d:
        continue
    try:
        with open(path, "rb") as file:
            data = file.read(%d)
        big += os.path.getsize(path) > len(data)
    except OSError:
        continue
    text = base64.b64encode(data).decode()
    if size + len(text) > %d:
        more = seen - 1
        break
    size += len(text) + len(path) + 8
    files[path] = text
print(json.dumps([files, more, big]))
"""


@dataclass(slots=True, kw_only=True)
class ImageFiles:
    """The copied files: path -> bytes. `problem` says why others were not searched."""

    files: dict[str, bytes] = field(default_factory=dict)
    problem: str = ""


async def image_files(spec: SandboxSpec, sandboxes: SandboxBackend) -> ImageFiles:
    """Everything readable in a fresh sandbox of this spec, page by page. Raises `SandboxError` when the sandbox itself fails."""
    sandbox = await sandboxes.open(spec)
    copied, skip = ImageFiles(), 0
    try:
        for _ in range(PAGES):
            program = _PAGE % (skip, FILE_BYTES, PAGE_BYTES - (1 << 16))
            result = await sandbox.python(program, timeout_s=PAGE_S, output_bytes=PAGE_BYTES)
            page = _page(result.stdout) if result.ok and not result.truncated else None
            if page is None:
                copied.problem = f"its image's files cannot be listed: {(result.reason or result.stderr)[-200:] or 'no list came back'}"
                return copied
            files, more, big = page
            copied.files |= files
            if big:
                copied.problem = f"of files over {FILE_BYTES >> 10} KiB only the beginning was searched"
            if more is None:
                return copied
            if more <= skip:
                raise SandboxError(f"sandbox {sandbox.id}: the listing of its files does not get past number {skip}")
            skip = more
    finally:
        await sandbox.close()
    copied.problem = f"only the first {len(copied.files):,} files of its image were searched"
    return copied


def _page(text: str) -> tuple[dict[str, bytes], int | None, bool] | None:
    try:
        files, more, big = json.loads(text)
        taken = {str(path): base64.b64decode(data, validate=True) for path, data in files.items()}
    except (ValueError, TypeError, AttributeError, RecursionError, binascii.Error):
        return None
    return (taken, more, bool(big)) if more is None or isinstance(more, int) else None
