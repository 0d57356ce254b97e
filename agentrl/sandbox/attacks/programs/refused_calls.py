"""Makes system calls that programs do not need and in which kernels had holes: bpf, keyrings, io_uring, tracing, modules.

kind: escape
seconds: 10
needs: x86_64
"""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "ptrace": 101, "syslog": 103, "personality": 135, "acct": 163, "swapon": 167, "reboot": 169, "sethostname": 170, "iopl": 172,
    "ioperm": 173, "create_module": 174, "init_module": 175, "quotactl": 179, "clock_settime": 227, "kexec_load": 246, "add_key": 248,
    "request_key": 249, "keyctl": 250, "migrate_pages": 256, "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "kcmp": 312, "finit_module": 313,
    "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "pidfd_getfd": 438,
    "quotactl_fd": 443,
}  # fmt: skip
done = []
block = ctypes.create_string_buffer(512)
for name, number in calls.items():
    pid = os.fork()
    if pid == 0:
        ctypes.set_errno(0)
        first = 1 if name in ("io_uring_setup", "userfaultfd", "keyctl", "fanotify_init") else 0
        answer = libc.syscall(number, first, block, 0, 0, 0, 0)
        # EPERM (1), ENOSYS (38): refused. Anything else means that the call was looked at.
        os._exit(0 if answer == -1 and ctypes.get_errno() in (1, 38) else 1)
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 1:
        done.append(name)
print(f"ESCAPED: the kernel listens to {', '.join(done)}" if done else f"held: {len(calls)} calls refused")
