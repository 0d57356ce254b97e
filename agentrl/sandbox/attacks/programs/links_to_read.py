"""Plants links, pipes, sockets and folders where the host reads its result.

kind: files
seconds: 10
host: planted_files
"""

import os
import socket

os.symlink("/etc/passwd", "passwd")
os.symlink("/etc", "etc")
os.symlink("/proc/1/environ", "environ")
os.symlink("loop", "loop")
os.mkfifo("pipe")
os.mkdir("folder")
socket.socket(socket.AF_UNIX).bind("socket")
try:
    os.link("/etc/hostname", "hard")
except OSError:
    os.symlink("/etc/hostname", "hard")
os.symlink("/dev/zero", "zero")
open("unreadable", "w").write("x")
os.chmod("unreadable", 0)
print("held: planted")
