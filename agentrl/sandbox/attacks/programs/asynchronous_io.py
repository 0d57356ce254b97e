"""Sets up contexts of asynchronous input and output until there are none left: the kernel has a fixed number for the whole machine.

kind: resources
seconds: 15
host: asynchronous_io
needs: x86_64
"""

import ctypes
import os
import time

libc = ctypes.CDLL(None, use_errno=True)
if os.fork() == 0:
    kept = 0
    while True:
        context = ctypes.c_ulong(0)
        if libc.syscall(206, 4000, ctypes.byref(context)) != 0:
            break
        kept += 1
    time.sleep(60)
time.sleep(1)
print("held: set up what there was", flush=True)
