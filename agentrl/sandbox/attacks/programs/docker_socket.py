"""Looks for the container daemon's socket, and for any other socket or pipe in the file tree.

kind: escape
seconds: 20
"""

import os
import socket
import stat

found = []
for top, folders, names in os.walk("/"):
    if top == "/":
        folders[:] = [name for name in folders if name not in ("proc", "usr")]
    for name in names:
        path = os.path.join(top, name)
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISSOCK(mode):
                socket.socket(socket.AF_UNIX).connect(path)
            if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                found.append(path)
        except OSError:
            continue
for path in ("/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock", "/run/systemd/private"):
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        found.append(path)
    except OSError:
        continue
print(f"ESCAPED: {found}" if found else "held: no socket in the tree")
