"""A session that stuffs its socket with descriptors and with packets of every size, for the server to keep or to choke on.

kind: resources
run: session
seconds: 5
ends: killed, exit
host: sessions_answer
"""

import contextlib
import os
import socket
import stat

link = next(
    socket.socket(fileno=os.dup(fd)) for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode)
)
link.setblocking(False)
print("held: sending", flush=True)
left, right = socket.socketpair()
for size in (0, 1, 5, 6, 100, 60000):
    for _ in range(100):
        with contextlib.suppress(OSError):
            socket.send_fds(link, [bytes(size)], [left.fileno(), right.fileno(), *range(3)] * 10)
