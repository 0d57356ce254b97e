"""Removes every permission from its files and folders, so that they cannot be captured.

kind: files
seconds: 10
host: captured
"""

import os

os.unlink("program.py")
os.makedirs("a/b/c")
for number in range(0o1000):
    with open(f"a/b/{number}", "w") as file:
        file.write("x")
    os.chmod(f"a/b/{number}", number)
for path, mode in (("a/b/c", 0), ("a/b", 0o111), ("a", 0o400), ("arena.json", 0)):
    os.chmod(path, mode)
try:
    open("arena.json").close()
except PermissionError:
    print("held: closed")
