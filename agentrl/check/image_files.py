"""Copies the files of an image that an agent can read, without those of its Linux distribution, to the host for searching.

The search runs on the host, so the truth never enters the sandbox. The sandbox's answers are bounded data.
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
"""Maximum number of bytes searched in a file."""
PAGE_S = 60.0

# Prints a page of files as JSON, and where the next page starts. Skips files of Debian packages, and Python's package folders.
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
    """All readable files of a fresh sandbox with this spec, page by page. Raises `SandboxError` if the sandbox fails."""
    sandbox = await sandboxes.open(spec)
    copied, skip = ImageFiles(), 0
    try:
        for _ in range(PAGES):
            program = _PAGE % (skip, FILE_BYTES, PAGE_BYTES - (1 << 16))
            result = await sandbox.python(program, timeout_s=PAGE_S, output_bytes=PAGE_BYTES)
            page = _page(result.stdout) if result.ok and not result.truncated else None
            if page is None:
                copied.problem = f"its image's files cannot be listed: {(result.reason or result.stderr)[-200:] or 'invalid output'}"
                return copied
            files, more, big = page
            copied.files |= files
            if big:
                copied.problem = f"only the first {FILE_BYTES >> 10} KiB of larger files were searched"
            if more is None:
                return copied
            if more <= skip:
                raise SandboxError(f"sandbox {sandbox.id}: the listing of its files does not advance past number {skip}")
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
