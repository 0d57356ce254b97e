"""A session that ends and leaves a child with its socket, which speaks for the session that comes after, and reaches for its socket.

kind: lifetime
run: session
seconds: 10
host: session_heirs
"""

import ctypes
import os
import socket
import stat
import struct
import time

libc = ctypes.CDLL(None)
print("held: leaving an heir", flush=True)
if libc.fork() == 0:  # past the interpreter, which would close the socket
    os.setsid()
    time.sleep(0.5)  # until the session has ended
    links = [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode)]
    end = time.monotonic() + 3.0
    taken = 0
    while time.monotonic() < end:
        for fd in links:
            for number in range(1, 4):
                try:
                    os.write(fd, struct.pack("=IB", number, 0))
                except OSError:
                    break
        for pid in os.listdir("/proc"):
            if pid.isdigit() and pid not in ("1", str(os.getpid())) and hasattr(os, "pidfd_open"):
                try:
                    process = os.pidfd_open(int(pid))
                except OSError:
                    continue
                taken += libc.syscall(438, process, 3, 0) >= 0
                try:
                    socket.socket(fileno=os.open(f"/proc/{pid}/fd/3", os.O_RDWR))
                    taken += 1
                except OSError:
                    pass
                os.close(process)
        with open("taken.new", "w") as file:
            file.write(str(taken))
        os.replace("taken.new", "taken")
        time.sleep(0.01)
    os._exit(0)
time.sleep(0.1)
os._exit(0)
