"""Leaves thousands of names and busy processes, so that collecting its outputs runs into the deadline.

kind: files
seconds: 20
ends: exit, memory, killed
host: nobody_at_the_outputs
"""

import os

made = 0
try:
    for number in range(5000):
        with open(f"{number:05}", "w"):
            made += 1
except OSError:
    pass
left = 0
try:
    for _ in range(30):
        if os.fork() == 0:
            os.setsid()
            for fd in (0, 1, 2):
                os.close(fd)
            while True:
                for number in range(256, made):
                    try:
                        os.rename(f"{number:05}", f"{number:05}.")
                        os.rename(f"{number:05}.", f"{number:05}")
                    except OSError:
                        pass
        left += 1
except OSError:
    pass
print(f"held: {made} names, {left} processes")
