"""Checks that the exec server is another user, on which all permission checks rest.

kind: lifetime
seconds: 10
needs: two users
"""

import os

with open("/proc/1/status") as file:
    server = next(line.split()[1:] for line in file if line.startswith("Uid:"))
mine = {str(number) for number in os.getresuid()}
print(
    f"ESCAPED: programs and server are both user {os.getuid()}" if mine & set(server) else f"held: user {os.getuid()}, server {server[0]}"
)
