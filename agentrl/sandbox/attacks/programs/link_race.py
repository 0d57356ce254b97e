"""Swaps a file and its folder for links and back, without pause, while the host reads and writes there.

kind: files
seconds: 10
host: link_race
"""

import os
import signal

os.makedirs("d/real")
open("d/real/f", "w").write("mine")
os.symlink("/etc", "d/link")
os.makedirs("e")
if os.fork() == 0:
    signal.alarm(8)
    os.close(1)
    os.close(2)
    while True:
        for source in ("d/real", "d/link"):
            try:
                os.rename("d/now", source)
            except OSError:
                pass
        for name in ("real", "link"):
            try:
                os.rename("d/" + name, "d/now")
                os.rename("d/now", "d/" + name)
            except OSError:
                pass
        try:
            os.symlink("/etc/passwd", "e/new")
            os.rename("e/new", "e/f")
            open("e/new", "w").write("mine")
            os.rename("e/new", "e/f")
        except OSError:
            pass
print("held: racing", flush=True)
