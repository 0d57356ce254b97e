"""Changes what the whole machine shares: clock, host name, terminal input, priorities, real-time scheduling.

kind: escape
seconds: 10
"""

import fcntl
import os
import socket
import time

done = []
try:
    time.clock_settime(time.CLOCK_REALTIME, time.time())
    done.append("clock")
except OSError:
    pass
try:
    socket.sethostname("attacked")
    done.append("host name")
except OSError:
    pass
for path in ("/dev/tty", "/dev/console", "/dev/pts/0"):
    try:
        fcntl.ioctl(os.open(path, os.O_RDWR | os.O_NOCTTY), 0x5412, b"x")
        done.append("typed into " + path)
    except OSError:
        continue
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    done.append("real time")
except OSError:
    pass
try:
    os.setpriority(os.PRIO_PROCESS, 0, -10)
    done.append("priority")
except OSError:
    pass
print(f"ESCAPED: {done}" if done else "held: refused")
