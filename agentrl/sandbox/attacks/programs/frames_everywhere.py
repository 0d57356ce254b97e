"""Writes forged frames into every descriptor it has or can open, and looks for a second way to the host.

kind: protocol
seconds: 10
"""

import json
import os
import socket
import stat
import struct

text = json.dumps({"id": 2, "ok": True, "exit": 0, "reason": "", "wall_s": 0.0, "truncated": False, "stdout": 0}).encode()
frame = struct.pack("!II", len(text), 0) + text
reached = []
for number in range(3, 4096):
    try:
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            reached.append(f"descriptor {number}")
        os.write(number, frame)
    except OSError:
        continue
for path in ("/agentrl/link", "\0agentrl", "/run/agentrl/link"):
    try:
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
        link.sendall(frame)
        reached.append(path)
    except OSError:
        continue
for pid in (entry for entry in os.listdir("/proc") if entry.isdigit()):
    for number in range(64):
        try:
            if pid != str(os.getpid()):
                os.write(os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY), frame)
                reached.append(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
print(f"ESCAPED: reached {', '.join(reached)}" if reached else "held: no descriptor leads to the host")
