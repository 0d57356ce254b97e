"""The system call filter of sandboxes, the same for every backend: a classic BPF program that the exec server installs.

It allows a list of calls (`agentrl.sandbox.system_calls`), so calls that future kernels add are refused. The
errors are those that programs expect: ENOSYS if libraries have an alternative, EPERM for what needs rights, EOPNOTSUPP and similar where
the kernel itself would answer so. For some calls the arguments decide: no new namespaces, no socket families except local and IP, no huge
pages (the machine has one supply), and no socket options, terminal commands or process properties that use kernel memory, load modules
or affect other processes. A wrong architecture kills the process.
A binary search finds a call's number in about seven steps.
"""

from __future__ import annotations

import errno
import functools
import platform
import socket
import struct
from collections.abc import Iterable

from agentrl.sandbox.system_calls import ALLOWED, CONDITIONAL, FORBIDDEN, NO_OP, UNSUPPORTED

Block = tuple[bytes, ...]
Ranges = Iterable[tuple[int, int]]

_LD_W_ABS, _AND, _JA, _JEQ, _JSET, _JGE, _RET = 0x20, 0x54, 0x05, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_FARTHEST = 255  # instructions that a conditional jump can skip
_NR, _ARCH = 0, 4
_ARG0, _ARG1, _ARG2, _ARG3 = range(16, 48, 8)  # offsets of the arguments' low halves in struct seccomp_data (little-endian)
_HIGH = 4  # the high half, relative to the low one
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_SEGMENT_BYTES = 4096
_SHM_HUGETLB, _MFD_HUGETLB, _MAP_HUGETLB = 0o4000, 0x4, 0x40000
_SOCKET_TYPE = 0xF
_QUERY_PERSONALITY = 0xFFFFFFFF
_TCP, _UDP, _SOL_SOCKET, _SOL_IPV6 = 6, 17, 1, 41

# Without 36 to 38 (locks of open files, which belong to no process and so cannot be counted), 1024 and 1040 (leases, which delay
# processes that open the file), and 1026 (notifications).
_FCNTL = ((0, 11), (15, 17), (1025, 1025), (1027, 1028), (1030, 1038))
# Terminals (0x54..) without TIOCSTI, TIOCLINUX, TIOCCONS (input and output of others) and TIOCSETD (loads line disciplines); sockets
# without bridges (which load a module); FICLONE, FICLONERANGE, FS_IOC_GETFLAGS.
_IOCTL = (
    *((0x5401, 0x5411), (0x5413, 0x541B), (0x541E, 0x5422), (0x5424, 0x5429), (0x5432, 0x5435), (0x5441, 0x5441), (0x5450, 0x545D)),
    *((0x5460, 0x5460), (0x80045430, 0x80045430), (0x40045431, 0x40045431), (0x80045438, 0x80045440), (0x802C542A, 0x802C542A)),
    *((0x402C542B, 0x402C542D), (0x8901, 0x8907), (0x8910, 0x893F), (0x8942, 0x8942), (0x8970, 0x8970)),
    *((0x40049409, 0x40049409), (0x4020940D, 0x4020940D), (0x80086601, 0x80086601)),
)
# PR_{SET,GET}_ PDEATHSIG, DUMPABLE, KEEPCAPS, NAME, SECCOMP (get only), CAPBSET, SECUREBITS (get only), TIMERSLACK, CHILD_SUBREAPER,
# NO_NEW_PRIVS, TID_ADDRESS, THP_DISABLE, CAP_AMBIENT, vector lengths, speculation, tagged addresses, MDWE.
_PRCTL = ((1, 4), (7, 8), (15, 16), (21, 21), (23, 24), (27, 27), (29, 30), (36, 42), (47, 47), (50, 56), (65, 66))
# By level. The missing ones use memory that is charged to no process (filters, memberships, keys, options; SO_RCVLOWAT raises the
# buffers of connections that are not accepted yet) or load modules.
_SOCKET_OPTIONS: dict[int, Ranges] = {
    0: ((1, 2), (8, 8), (10, 13), (15, 15), (24, 24), (32, 34)),
    _SOL_SOCKET: ((2, 2), (5, 6), (9, 10), (12, 13), (15, 16), (19, 21), (25, 25), (29, 29), (35, 35), (42, 42), (66, 67)),
    _TCP: ((1, 10), (12, 12), (18, 18), (25, 25)),
    _SOL_IPV6: ((16, 19), (23, 23), (25, 26), (49, 49), (51, 51), (66, 67)),
}
_BUFFER_SIZES = ((7, 8),)  # SO_SNDBUF and SO_RCVBUF succeed without effect: a socket keeps the size that its namespace sets


def supported() -> bool:
    """Whether there is a filter for this machine's architecture."""
    return platform.machine() in _AUDIT_ARCH


@functools.cache
def filter_program() -> bytes:
    """The filter for this machine: an array of `struct sock_filter`, as `seccomp(2)` takes it."""
    machine = platform.machine()
    column = 0 if machine == "x86_64" else 1
    calls: dict[int, Block] = {}
    fixed = ((ALLOWED, _allow()), (NO_OP, _answer(0)), (UNSUPPORTED, _answer(errno.EOPNOTSUPP)), (FORBIDDEN, _answer(errno.EPERM)))
    for table, block in fixed:
        calls |= {number: block for numbers in table.values() if (number := numbers[column]) is not None}
    for name, block in _conditional().items():
        number = CONDITIONAL[name][column]
        assert number is not None
        calls[number] = block
    ranges = {number: (number, block) for number, block in calls.items()}
    start = (_op(_LD_W_ABS, _ARCH), _op(_JEQ, _AUDIT_ARCH[machine], 1, 0), _op(_RET, _KILL))
    return b"".join((*start, *_choice(_NR, ranges, _answer(errno.ENOSYS))))


def _conditional() -> dict[str, Block]:
    """The instructions for calls whose arguments decide."""
    no_family, no_protocol = _answer(errno.EAFNOSUPPORT), _answer(errno.EPROTONOSUPPORT)
    kinds = _kinds({socket.SOCK_STREAM: _TCP, socket.SOCK_DGRAM: _UDP}, no_protocol)
    families = {socket.AF_UNIX: _allow(), socket.AF_INET: kinds, socket.AF_INET6: kinds}
    no_option = _answer(errno.ENOPROTOOPT)
    levels = {level: _permitted(_ARG2, options, no_option) for level, options in _SOCKET_OPTIONS.items()}
    levels[_SOL_SOCKET] = _choice(_ARG2, {**_each(_BUFFER_SIZES, _answer(0)), **_each(_SOCKET_OPTIONS[_SOL_SOCKET], _allow())}, no_option)
    small = (
        _op(_LD_W_ABS, _ARG1 + _HIGH),
        _op(_JEQ, 0, 1, 0),
        *_answer(errno.EINVAL),
        *_choice(_ARG1, {0: (_SEGMENT_BYTES, _without(_ARG2, _SHM_HUGETLB, errno.EPERM))}, _answer(errno.EINVAL)),
    )
    return {
        "clone": (
            *(_op(_LD_W_ABS, _ARG0), _op(_JSET, _NEW_NAMESPACES, 2, 0)),
            *(_op(_AND, _CLONE_FILES | _CLONE_THREAD), _op(_JEQ, _CLONE_FILES, 0, 1)),  # would hold locks of a dead process
            *(*_answer(errno.EPERM), *_allow()),
        ),
        "socket": _choice(_ARG0, {family: (family, block) for family, block in families.items()}, no_family),
        "socketpair": _permitted(_ARG0, ((socket.AF_UNIX, socket.AF_UNIX),), no_family),
        "setsockopt": _choice(_ARG1, {level: (level, block) for level, block in levels.items()}, no_option),
        "fcntl": _permitted(_ARG1, _FCNTL, _answer(errno.EINVAL)),
        "ioctl": _permitted(_ARG1, _IOCTL, _answer(errno.ENOTTY)),
        "prctl": _permitted(_ARG0, _PRCTL, _answer(errno.EINVAL)),
        "shmget": small,
        "mmap": _without(_ARG3, _MAP_HUGETLB, errno.ENOMEM),
        "memfd_create": _without(_ARG1, _MFD_HUGETLB, errno.EINVAL),
        "personality": _permitted(_ARG0, ((_QUERY_PERSONALITY, _QUERY_PERSONALITY),), _answer(errno.EPERM)),
    }


def _permitted(offset: int, ranges: Ranges, otherwise: Block) -> Block:
    """Allows a call whose argument at `offset` is in one of `ranges`, both ends included."""
    return _choice(offset, _each(ranges, _allow()), otherwise)


def _without(offset: int, flag: int, code: int) -> Block:
    """Allows a call unless `flag` is set in the argument at `offset`."""
    return (_op(_LD_W_ABS, offset), _op(_JSET, flag, 1, 0), *_allow(), *_answer(code))


def _kinds(protocols: dict[socket.SocketKind, int], no_protocol: Block) -> Block:
    """Sockets of these types, each with its protocol or 0. For any other pair the kernel would run modprobe as the host's root."""
    unknown, raw = _answer(errno.ESOCKTNOSUPPORT), _answer(errno.EPERM)
    blocks = {int(kind): _permitted(_ARG2, ((0, 0), (number, number)), no_protocol) for kind, number in protocols.items()}
    steps: list[tuple[int, Block]] = [(0, unknown), *blocks.items(), (int(socket.SOCK_RAW), raw), (int(socket.SOCK_RAW) + 1, unknown)]
    return (_op(_LD_W_ABS, _ARG1), _op(_AND, _SOCKET_TYPE), *_search(steps))


def _each(ranges: Ranges, block: Block) -> dict[int, tuple[int, Block]]:
    return {first: (last, block) for first, last in ranges}


def _choice(offset: int, blocks: dict[int, tuple[int, Block]], otherwise: Block) -> Block:
    """Runs the block for the value at `offset`. `blocks`: first value -> (last value, block); `otherwise` is for all other values."""
    steps: list[tuple[int, Block]] = [(0, otherwise)]  # (first value, block), up to the next step's first value
    for first, (last, block) in sorted(blocks.items()):
        assert first >= steps[-1][0], "ranges overlap"
        for start, step in ((first, block), (last + 1, otherwise)):
            if steps[-1][0] == start:
                steps.pop()
            if not steps or steps[-1][1] != step:
                steps.append((start, step))
    return (_op(_LD_W_ABS, offset), *_search([step for step in steps if step[0] < 1 << 32]))


def _search(steps: list[tuple[int, Block]]) -> Block:
    """Runs the step of the loaded value, found by binary search."""
    if len(steps) == 1:
        return steps[0][1]
    middle = len(steps) // 2
    low, high = _search(steps[:middle]), _search(steps[middle:])
    if len(low) <= _FARTHEST:
        return (_op(_JGE, steps[middle][0], len(low), 0), *low, *high)
    return (_op(_JGE, steps[middle][0], 0, 1), _op(_JA, len(low)), *low, *high)


def _allow() -> Block:
    return (_op(_RET, _ALLOW),)


def _answer(code: int) -> Block:
    """Makes the call fail with `code`, or return 0 without effect."""
    return (_op(_RET, _ERRNO | code),)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
