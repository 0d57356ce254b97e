"""Ends well and leaves work behind, scheduled past the end of the episode in every way there is.

kind: lifetime
seconds: 10
"""

import os
import signal
import subprocess
import time

if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.closerange(0, 3)
    time.sleep(600)
    os._exit(0)
for command in ("nohup sleep 600 &", "setsid sleep 600 &", "(sleep 600 &) &", "echo 'sleep 600' | at now", "crontab -l"):
    subprocess.run(["sh", "-c", command + " 2>/dev/null"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
print("held: sleepers left")
