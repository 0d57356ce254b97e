"""Nests folders thousands deep, deeper than paths may be, and puts very many entries beside them.

kind: resources
seconds: 20
ends: exit, memory, killed
host: snapshot_refused
"""

import os

home = os.getcwd()
depth = 0
try:
    while depth < 5000:
        os.mkdir("d" * 100)
        os.chdir("d" * 100)
        depth += 1
except OSError:
    pass
os.chdir(home)
try:
    for number in range(25000):
        os.symlink("x", f"link{number}")
except OSError:
    pass
print(f"held: {depth} levels")
