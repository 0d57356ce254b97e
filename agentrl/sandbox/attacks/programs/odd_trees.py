"""Leaves trees that take long to walk: the longest names at every depth, names of any bytes, and more entries than a snapshot takes.

kind: files
seconds: 20
ends: exit, memory, killed
host: captured_or_too_large
"""

import os

home, entries = os.getcwd(), 0
try:
    for tree in (b"\xff", b"d"):
        os.chdir(home)
        for _ in range(60):
            os.mkdir(tree * 255)
            os.chdir(tree * 255)
            entries += 1
        for number in range(1500):
            with open(b"%s%05d" % (tree * 250, number), "w"):
                entries += 1
except OSError as error:
    print(str(error))
os.chdir(home)
print(f"held: {entries} entries")
