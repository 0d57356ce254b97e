"""Overwrites the program that process 1 runs, or reaches the runtime's files through leaked descriptors and directories.

kind: escape
seconds: 10
"""

import os

done = []
for path in (
    "/proc/1/exe",
    "/proc/self/exe",
    "/usr/bin/python3",
    "/usr/lib",
    "/bin/sh",
    "/etc/passwd",
    "/agentrl",
    "/agentrl/exec_server.py",
):
    for flags in (os.O_WRONLY, os.O_RDWR):
        try:
            os.close(os.open(path, flags))
            done.append(path)
        except OSError:
            continue
    try:
        os.chmod(path, 0o777)
        done.append("chmod " + path)
    except OSError:
        pass
for path in ("/", "/usr", "/etc", "/agentrl", "/dev", "/home", "/sys", "/run"):
    try:
        os.mkdir(path + "/agentrl-attack")
        done.append("folder in " + path)
    except OSError:
        continue
if os.getcwd() != "/home/agent":
    done.append("cwd " + os.getcwd())
print(f"ESCAPED: {done}" if done else "held: nothing outside the working directory can be written")
