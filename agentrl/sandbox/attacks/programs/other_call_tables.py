"""Goes around a filter by system call number: 32-bit calls from 64-bit code, and the x32 table.

kind: escape
seconds: 10
needs: x86_64
"""

import ctypes
import mmap
import os

libc = ctypes.CDLL(None, use_errno=True)
done = []
pid = os.fork()
if pid == 0:
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    os._exit(1 if call() == os.getpid() else 0)
if os.waitpid(pid, 0)[1] >> 8 == 1:
    done.append("32-bit calls answer")
pid = os.fork()
if pid == 0:
    os._exit(1 if libc.syscall(0x40000000 + 39) == os.getpid() else 0)
if os.waitpid(pid, 0)[1] >> 8 == 1:
    done.append("x32 calls answer")
print(f"ESCAPED: {', '.join(done)}" if done else "held: one table only")
