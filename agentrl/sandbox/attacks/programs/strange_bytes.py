"""Prints what is not text: broken UTF-8, NULs, terminal commands, lone surrogates, very long lines, direction marks.

kind: protocol
seconds: 10
"""

import os

os.write(1, b"held: printed\n")
for _ in range(64):
    os.write(
        1,
        bytes(range(256)) + b"\xed\xa0\x80\xf8\x88\x80\x80\x80\xc0\xaf" + b"\x1b]0;title\x07\x1b[2J\x1bc\x1b[6n" + "\u202e\ufeff".encode(),
    )
    os.write(2, b"\xff\xfe\x00\xd8" * 100)
