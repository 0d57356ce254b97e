"""Touches one page at each of very many distant addresses, so that page tables grow instead of the process.

kind: resources
needs: control groups
seconds: 15
ends: exit, memory, killed
"""

import mmap

kept = []
print("held: touching", flush=True)
try:
    for _ in range(2000):
        area = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
        for at in range(0, 1 << 30, 2 << 20):
            area[at : at + 1]
        kept.append(area)
except (OSError, MemoryError):
    pass
print(f"held: {len(kept)} GiB of addresses", flush=True)
