"""Writes every setting of the kernel it can find: core_pattern, sysrq, uevent helpers, /proc/sys and /sys.

kind: escape
seconds: 20
"""

import os
import stat

done = []
single = (
    "/proc/sysrq-trigger",
    "/proc/kcore",
    "/proc/kmsg",
    "/dev/kmsg",
    "/proc/acpi/wakeup",
    "/proc/bus/pci",
    "/sys/kernel/uevent_helper",
)
for path in single:
    try:
        os.close(os.open(path, os.O_WRONLY))
        done.append(path)
    except OSError:
        continue
mine = {f"/proc/{os.getpid()}", "/proc/self", "/proc/thread-self"}
for top in ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/scsi", "/sys"):
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if folder + "/" + name not in mine]
        for name in files:
            path = folder + "/" + name
            try:
                if os.lstat(path).st_mode & stat.S_IWOTH:
                    with open(path, "r+b", buffering=0) as file:
                        file.write(file.read(4096) or b"1")
                    done.append(path)
            except OSError:
                continue
for name in ("core_pattern", "hostname", "modprobe", "ns_last_pid", "shm_rmid_forced", "msgmax", "domainname"):
    try:
        with open("/proc/sys/kernel/" + name, "w") as file:
            file.write("1")
        done.append(name)
    except OSError:
        continue
print(f"ESCAPED: can write {done[:8]}" if done else "held: no setting can be written")
