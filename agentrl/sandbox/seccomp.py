"""A system call filter for sandboxes, the same under every backend: a classic BPF program that the exec server installs.

It refuses (EPERM) what a program in a sandbox has no use for and kernels have had holes in: new namespaces, mounts, tracing,
keyrings, BPF, io_uring, modules, and socket families other than local, IPv4 and IPv6. `clone3` answers ENOSYS, because its
flags are behind a pointer; libraries fall back to `clone`, whose flags are checked. So do System V queues and semaphores, which
would keep kernel memory after the last program has ended; shared segments may have a page. A wrong architecture kills the
process.
"""

from __future__ import annotations

import errno
import functools
import platform
import socket
import struct

_LD_W_ABS, _JEQ, _JSET, _JGE, _RET = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NR, _ARCH, _ARG0, _ARG1, _ARG1_HIGH = 0, 4, 16, 24, 28  # offsets in struct seccomp_data, low halves first (little-endian)
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# System call numbers: (x86_64, aarch64); None: does not exist there.
_DENIED: dict[str, tuple[int | None, int]] = {
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "personality": (135, 92),
    "acct": (163, 89),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "iopl": (172, 0xFFFF),
    "ioperm": (173, 0xFFFF),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "lookup_dcookie": (212, 18),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
}
_ABSENT: dict[str, tuple[int, int]] = {"clone3": (435, 435), "semget": (64, 190), "msgget": (68, 186)}
_CLONE, _SOCKET, _SHMGET = (56, 220), (41, 198), (29, 194)
_SEGMENT_BYTES = 4096


def supported() -> bool:
    """Whether this machine's architecture has a filter here."""
    return platform.machine() in _AUDIT_ARCH


@functools.cache
def program() -> bytes:
    """The filter for this machine: an array of `struct sock_filter`, as `seccomp(2)` takes it."""
    machine = platform.machine()
    column = 0 if machine == "x86_64" else 1
    lines = [_op(_LD_W_ABS, _ARCH), _op(_JEQ, _AUDIT_ARCH[machine], 1, 0), _op(_RET, _KILL), _op(_LD_W_ABS, _NR)]
    if machine == "x86_64":
        lines += [_op(_JGE, _X32_BIT, 0, 1), _op(_RET, _refuse(errno.ENOSYS))]
    for absent in _ABSENT.values():
        lines += [_op(_JEQ, absent[column], 0, 1), _op(_RET, _refuse(errno.ENOSYS))]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            lines += [_op(_JEQ, number, 0, 1), _op(_RET, _refuse(errno.EPERM))]
    lines += _when(_CLONE[column], [_op(_LD_W_ABS, _ARG0), _op(_JSET, _NEW_NAMESPACES, 0, 1), _op(_RET, _refuse(errno.EPERM))])
    families = [_op(_JEQ, family, len(_FAMILIES) - place, 0) for place, family in enumerate(_FAMILIES)]
    lines += _when(_SOCKET[column], [_op(_LD_W_ABS, _ARG0), *families, _op(_RET, _refuse(errno.EAFNOSUPPORT))])
    too_large = [_op(_LD_W_ABS, _ARG1_HIGH), _op(_JEQ, 0, 0, 2), _op(_LD_W_ABS, _ARG1), _op(_JGE, _SEGMENT_BYTES + 1, 0, 1)]
    lines += _when(_SHMGET[column], [*too_large, _op(_RET, _refuse(errno.EINVAL))])
    lines.append(_op(_RET, _ALLOW))
    return b"".join(lines)


def _when(number: int, block: list[bytes]) -> list[bytes]:
    """`block` for system call `number` (then everything else is allowed), skipped for others."""
    return [_op(_JEQ, number, 0, len(block) + 1), *block, _op(_RET, _ALLOW)]


def _refuse(code: int) -> int:
    return 0x00050000 | code


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
