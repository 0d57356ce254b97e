"""Types into a terminal for somebody else, takes the console, and has line disciplines loaded.

kind: escape
seconds: 10
"""

import fcntl
import os
import struct

typed, console, keys, discipline = 0x5412, 0x541D, 0x541C, 0x5423
master, terminal = os.openpty()
done = []
commands = [("TIOCSTI", typed, b"x"), ("TIOCCONS", console, b""), ("TIOCLINUX", keys, b"\x02" + bytes(15))]
commands += [(f"discipline {number}", discipline, struct.pack("i", number)) for number in range(1, 31)]
for name, command, argument in commands:
    try:
        fcntl.ioctl(terminal, command, argument)
        done.append(name)
    except OSError as error:
        if error.errno not in (1, 25):  # EPERM, ENOTTY: else the command was looked at, and a module perhaps looked for
            done.append(f"{name} ({error.strerror})")
print(f"ESCAPED: the terminal takes {', '.join(done)}" if done else f"held: {len(commands)} commands refused", flush=True)
