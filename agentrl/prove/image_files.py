"""The files that an image shows an agent, without those of its Linux distribution: taken out of a sandbox to be searched on the host.

The truth stays on the host: nothing is looked for inside. What the sandbox says is data, and bounded.
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
"""Of a larger file, its beginning."""
PAGE_S = 60.0

# Prints a page of files as JSON, and where the next one begins. Files of Debian's packages are left out, and Python's own places.
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
    """What was taken: path -> bytes. `problem` says what kept the rest from being searched."""

    files: dict[str, bytes] = field(default_factory=dict)
    problem: str = ""


async def image_files(spec: SandboxSpec, sandboxes: SandboxBackend) -> ImageFiles:
    """Everything readable in a fresh sandbox of this kind, in pages. Raises `SandboxError` when the sandbox itself fails."""
    sandbox = await sandboxes.open(spec)
    found, skip = ImageFiles(), 0
    try:
        for _ in range(PAGES):
            program = _PAGE % (skip, FILE_BYTES, PAGE_BYTES - (1 << 16))
            result = await sandbox.python(program, timeout_s=PAGE_S, output_bytes=PAGE_BYTES)
            page = _page(result.stdout) if result.ok and not result.truncated else None
            if page is None:
                found.problem = f"the files of its image cannot be listed: {(result.reason or result.stderr)[-200:] or 'no list came back'}"
                return found
            files, more, big = page
            found.files |= files
            if big:
                found.problem = f"files of more than {FILE_BYTES >> 10} KiB were searched in their beginning only"
            if more is None:
                return found
            if more <= skip:
                raise SandboxError(f"sandbox {sandbox.id}: the listing of its files does not come further than {skip}")
            skip = more
    finally:
        await sandbox.close()
    found.problem = f"only the first {len(found.files):,} files of its image were searched"
    return found


def _page(text: str) -> tuple[dict[str, bytes], int | None, bool] | None:
    try:
        files, more, big = json.loads(text)
        taken = {str(path): base64.b64decode(data, validate=True) for path, data in files.items()}
    except (ValueError, TypeError, AttributeError, RecursionError, binascii.Error):
        return None
    return (taken, more, bool(big)) if more is None or isinstance(more, int) else None
