"""Writes to both streams without end, from several processes, no line ever ending.

kind: resources
seconds: 1.5
ends: timeout
"""

import os

os.write(1, b"held: output began\n")
os.fork()
while True:
    os.write(1, b"x" * 65536)
    os.write(2, b"\xff" * 65536)
