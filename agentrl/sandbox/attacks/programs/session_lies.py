"""A session that claims to be done when it is not, also for future calls, sends unrequested data, and never listens.

kind: protocol
run: session
seconds: 5
host: session_lies
"""

import contextlib
import os
import socket
import stat
import struct
import threading


def control() -> socket.socket:
    """The socket that a session's process was given."""
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                return socket.socket(fileno=os.dup(fd))
    raise SystemExit("no socket")


def lie(link: socket.socket) -> None:
    for number in range(1, 1000):
        link.send(struct.pack("=IB", number, 0))
    link.send(b"{}" * 10000)


print("held: lying", flush=True)
threading.Thread(target=lie, args=(control(),)).start()
threading.Event().wait()
