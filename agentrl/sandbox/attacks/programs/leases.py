"""Holds its files under leases, from a daemon that ignores signals and keeps them open after its end: opening them blocks.

kind: files
seconds: 15
host: captured
"""

import fcntl
import os
import signal
import socket
import time

with open("result", "w") as file:
    file.write("leased")
if os.fork() == 0:
    os.setsid()
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    said = "leased"
    files = [os.open(name, os.O_RDWR) for name in ("result", "program.py", "arena.json")]
    try:
        for fd in files:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        said = str(error)
    one, other = socket.socketpair()
    socket.send_fds(one, [b"x"], [*files, one.fileno(), other.fileno()])  # open as long as the kernel has not found them
    with open("said.new", "w") as file:
        file.write(said)
    os.rename("said.new", "said")
    for fd in (1, 2):
        os.close(fd)
    time.sleep(600)
while not os.path.exists("said"):
    time.sleep(0.01)
print(f"held: {open('said').read()}")
