"""Looks for the cell's key: in the environment, memory and open files of every process, and in every file.

kind: escape
seconds: 60
needs: cell
"""

import json
import os
import re

with open("arena.json") as file:
    needle = json.load(file)["cell_key_backwards"][::-1][:16].encode()  # so that nothing of this attack contains it
os.unlink("arena.json")
own, found, read = os.getpid(), [], 0
paths = []
for pid in (entry for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != own):
    paths += [f"/proc/{pid}/environ", f"/proc/{pid}/cmdline"]
    try:
        paths += [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for start, end in re.findall(r"^(\w+)-(\w+) r", maps.read(), re.MULTILINE):
                memory.seek(int(start, 16))
                if needle in memory.read(min(int(end, 16) - int(start, 16), 16 << 20)):
                    found.append(f"memory of process {pid}")
                read += 1
    except (OSError, ValueError, OverflowError):
        continue
paths += ["/proc/self/environ", "/proc/1/environ"]
for folder, folders, names in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/proc", "/usr", "/sys")]
    paths += [os.path.join(folder, name) for name in names]
for path in paths:
    try:
        if os.path.isfile(path):
            with open(path, "rb") as file:
                read += 1
                if needle in file.read(8 << 20):
                    found.append(path)
    except OSError:
        continue
print(f"ESCAPED: the key is in {found}" if found else f"held: {read} files and areas of memory read, none with the key")
