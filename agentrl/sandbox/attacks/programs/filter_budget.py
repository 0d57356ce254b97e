"""Loads filters of sockets and of system calls until there is no room: compiled, they share one budget of the whole machine.

kind: resources
seconds: 20
host: filter_budget
needs: x86_64
"""

import ctypes
import os
import socket
import struct
import time

libc = ctypes.CDLL(None, use_errno=True)
steps = 4000
code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x04, 0, 0, 7) * (steps - 1) + struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(struct.pack("@HP", steps, ctypes.addressof(code)))
loaded = 0
for option in (26, 51):  # SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF
    kept = []
    for _ in range(100):
        kept.append(socket.socket(type=socket.SOCK_DGRAM))
        loaded += libc.setsockopt(kept[-1].fileno(), 1, option, program, 16) == 0
    for end in kept:
        end.close()
pid = os.fork()
if pid == 0:
    libc.prctl(38, 1, 0, 0, 0)
    done = libc.prctl(22, 2, program, 0, 0) == 0 or libc.syscall(317, 1, 0, program) == 0
    os._exit(done)
loaded += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(f"ESCAPED: the kernel compiled {loaded} filters" if loaded else "held: no filter loaded", flush=True)
time.sleep(0)
