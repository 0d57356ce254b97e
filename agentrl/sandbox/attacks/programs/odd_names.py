"""Names files so that an archive of them might be misread: control characters, broken UTF-8, `..` look-alikes, the longest names.

kind: files
seconds: 10
host: snapshot_opens
"""

import os

names = [
    b"a\nb",
    b"\xff\xfe",
    b"..\\x",
    b"... ",
    b"~",
    b"-rf",
    b"x" * 255,
    b"\x1b[2J",
    b"a\tb",
    b" ",
    b"con:",
    "é\u202e".encode(),
    b"%2e%2e%2f",
]
for name in names:
    os.mkdir(name)
    open(os.path.join(name, b"f"), "w").write("x")
os.symlink("../../../../etc/passwd", "up")
os.symlink("/", "root")
os.symlink("x" * 4000, "long")
os.link(b"a\nb/f", "hard")
os.chmod(b"~", 0o7777)
print("held: named")
