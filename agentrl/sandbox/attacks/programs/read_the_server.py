"""Reads, traces and takes over process 1: its memory, descriptors, environment, file system and channel.

kind: lifetime
seconds: 10
"""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
done = []
for name in (
    "mem",
    "environ",
    "maps",
    "stack",
    "syscall",
    "auxv",
    "io",
    "pagemap",
    "fd/3",
    "fd/4",
    "fd/5",
    "map_files",
    "root/etc",
    "cwd/etc",
):
    path = "/proc/1/" + name
    try:
        if os.path.isdir(path):
            done += [name] if os.listdir(path) else []
        else:
            with open(path, "rb") as file:
                done += [name] if file.read(1) else []
    except OSError:
        continue
if libc.ptrace(16, 1, 0, 0) == 0 or libc.ptrace(0x4206, 1, 0, 0) == 0:
    done.append("ptrace")
buffer = ctypes.create_string_buffer(8)


class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


vector = Vector(ctypes.addressof(buffer), 8)
if libc.process_vm_readv(1, ctypes.byref(vector), 1, ctypes.byref(vector), 1, 0) > 0:
    done.append("process_vm_readv")
process = libc.syscall(434, 1, 0)
for number in range(8):
    if process >= 0 and libc.syscall(438, process, number, 0) >= 0:
        done.append(f"pidfd_getfd {number}")
print(f"ESCAPED: reached the server's {', '.join(done)}" if done else "held: the server is out of reach", flush=True)
