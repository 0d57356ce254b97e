"""The system call filter of sandboxes: a classic BPF program that the exec server installs, the same for every backend.

The filter allows only the calls in the tables below, so calls that future kernels add are refused. A refused call fails with an error that
programs expect: ENOSYS if libraries have an alternative, EPERM for calls that need rights, EOPNOTSUPP or a similar error if the kernel
would return it. Some calls are allowed only with certain arguments: no new namespaces, no socket families except local and IP, no huge
pages (the machine has a fixed number), and no socket options, terminal commands or process properties that use kernel memory, load modules
or affect other processes. A call for the wrong architecture kills the process. A binary search finds a call's number in about seven steps.

Each entry of a table is `name:x86_64:aarch64`, with `-` if an architecture lacks the call. Once assigned, a number never changes
(`asm/unistd_64.h`, `asm-generic/unistd.h`). A call that is not in any table, such as a future one, fails with ENOSYS; libraries then use
alternatives. `scripts/system_calls.py` shows which calls programs need.

These calls are missing on purpose:

- clone3: the filter cannot check its flags, which are behind a pointer. Libraries fall back to clone, whose flags are checked.
- io_setup, io_submit and others: the machine has a fixed number of contexts, all of which one sandbox could use.
- io_uring_*: a second way to make every call, which bypasses the filter.
- seccomp: compiled filters share one budget per machine, so sandboxes cannot be nested.
- landlock_*: needed only for nested sandboxes.
- semget, msgget and mq_open: most queues and semaphores in the kernel outlive their programs.
- statmount, listmount, open_tree_attr, setxattrat, futex_wait, mseal, memfd_secret, map_shadow_stack, cachestat and lsm_*: newer calls that
  no program needs yet.
- vmsplice, tee, remap_file_pages, process_madvise and modify_ldt: rare alternatives to other calls.
"""

from __future__ import annotations

import errno
import functools
import platform
import socket
import struct
from collections.abc import Iterable

Numbers = dict[str, tuple[int | None, int | None]]


def _table(text: str) -> Numbers:
    words = [word.split(":") for line in text.splitlines() if not line.startswith("#") for word in line.split()]
    return {name: (None if x86 == "-" else int(x86), None if arm == "-" else int(arm)) for name, x86, arm in words}


ALLOWED = _table("""
# files, by descriptor and by name
read:0:63 write:1:64 open:2:- close:3:57 creat:85:- openat:257:56 openat2:437:437 close_range:436:436 stat:4:- fstat:5:80 lstat:6:-
newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44 access:21:- faccessat:269:48 faccessat2:439:439 lseek:8:62
pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70 preadv2:327:286 pwritev2:328:287 getdents:78:-
getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- renameat:264:38 renameat2:316:276 mkdir:83:- mkdirat:258:34
rmdir:84:- mknod:133:- mknodat:259:33 link:86:- linkat:265:37 unlink:87:- unlinkat:263:35 symlink:88:- symlinkat:266:36
readlink:89:- readlinkat:267:78 chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55 lchown:94:-
fchownat:260:54 umask:95:166 utime:132:- utimes:235:- futimesat:261:- utimensat:280:88 truncate:76:45 ftruncate:77:46
fallocate:285:47 fsync:74:82 fdatasync:75:83 sync_file_range:277:84 fadvise64:221:223 readahead:187:213 flock:73:32 sendfile:40:71
copy_file_range:326:285 splice:275:76 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12
flistxattr:196:13 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16 inotify_init:253:- inotify_init1:294:26
inotify_add_watch:254:27 inotify_rm_watch:255:28
# descriptors and waiting
dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59 poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:-
epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:- eventfd2:290:19
signalfd:282:- signalfd4:289:74 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87
# memory
mprotect:10:226 munmap:11:215 brk:12:214 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233 mlock:149:228
mlock2:325:284 munlock:150:229 mlockall:151:230 munlockall:152:231 membarrier:324:283 pkey_alloc:330:289
pkey_free:331:290 pkey_mprotect:329:288 shmat:30:196 shmdt:67:197 shmctl:31:195
# processes and threads
fork:57:- vfork:58:- execve:59:221 execveat:322:281 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 set_tid_address:218:96
set_robust_list:273:99 get_robust_list:274:100 rseq:334:293 futex:202:98 arch_prctl:158:- restart_syscall:219:128 getpid:39:172
getppid:110:173 gettid:186:178 getpgid:121:155 setpgid:109:154 getpgrp:111:- getsid:124:156 setsid:112:157 getpriority:140:141
setpriority:141:140 ioprio_get:252:31 ioprio_set:251:30 sched_yield:24:124 sched_getaffinity:204:123 sched_setaffinity:203:122
sched_getparam:143:121 sched_setparam:142:118 sched_getscheduler:145:120 sched_setscheduler:144:119 sched_getattr:315:275
sched_setattr:314:274 sched_get_priority_max:146:125 sched_get_priority_min:147:126 sched_rr_get_interval:148:127 getrlimit:97:163
setrlimit:160:164 prlimit64:302:261 getrusage:98:165 times:100:153 getcpu:309:168
# signals
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133
rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 sigaltstack:131:132 kill:62:129 tkill:200:130 tgkill:234:131 pause:34:-
pidfd_open:434:434 pidfd_send_signal:424:424
# users and rights: without a capability they can only be given up
getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158 setuid:105:146
setgid:106:144 setreuid:113:145 setregid:114:143 setresuid:117:147 setresgid:119:149 setfsuid:122:151 setfsgid:123:152
setgroups:116:159 capget:125:90 capset:126:91
# time and the machine
time:201:- gettimeofday:96:169 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 nanosleep:35:101 alarm:37:-
getitimer:36:102 setitimer:38:103 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109
timer_delete:226:111 uname:63:160 sysinfo:99:179 getrandom:318:278
# sockets, whose families and options are checked below
bind:49:200 connect:42:203 listen:50:201 accept:43:202 accept4:288:242 getsockname:51:204 getpeername:52:205 shutdown:48:210
sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 sendmmsg:307:269 recvmmsg:299:243 getsockopt:55:209
""")
"""Allowed with any arguments."""

CONDITIONAL = _table("""
clone:56:220 socket:41:198 socketpair:53:199 setsockopt:54:208 fcntl:72:25 ioctl:16:29 prctl:157:167 shmget:29:194 mmap:9:222
memfd_create:319:279 personality:135:92
""")
"""Allowed or refused depending on the arguments."""

NO_OP = _table("""
sync:162:81 syncfs:306:267
""")
"""Return 0 without effect: a sandbox's files are in memory, and the kernel would write out the files of the entire machine."""

UNSUPPORTED = _table("""
setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7
""")
"""Fail as if extended attributes were unsupported, because their kernel memory is charged to no process. `cp -a` and `tar` continue."""

FORBIDDEN = _table("""
ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 kcmp:312:272 pidfd_getfd:438:438 syslog:103:116 mount:165:40
umount2:166:39 pivot_root:155:41 chroot:161:51 unshare:272:97 setns:308:268 open_tree:428:428 move_mount:429:429 fsopen:430:430
fsconfig:431:431 fsmount:432:432 fspick:433:433 mount_setattr:442:442 name_to_handle_at:303:264 open_by_handle_at:304:265
fanotify_init:300:262 fanotify_mark:301:263 quotactl:179:60 quotactl_fd:443:443 vhangup:153:58 bpf:321:280 perf_event_open:298:241
userfaultfd:323:282 lookup_dcookie:212:18 init_module:175:105 finit_module:313:273 delete_module:176:106 kexec_load:246:104
kexec_file_load:320:294 acct:163:89 swapon:167:224 swapoff:168:225 reboot:169:142 sethostname:170:161 setdomainname:171:162
settimeofday:164:170 clock_settime:227:112 clock_adjtime:305:266 adjtimex:159:171 iopl:172:- ioperm:173:- add_key:248:217
request_key:249:218 keyctl:250:219 mbind:237:235 set_mempolicy:238:237 set_mempolicy_home_node:450:450 get_mempolicy:239:236
migrate_pages:256:238 move_pages:279:239
""")
"""Fail with EPERM, as for a user without the right."""

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

# Excludes 36 to 38 (locks of open files, which cannot be counted because they do not belong to a process), 1024 and 1040 (leases, which
# delay processes that open the file), and 1026 (notifications).
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
# By level. The missing options use memory that is not charged to any process (filters, memberships, keys, options; SO_RCVLOWAT enlarges
# the buffers of connections that are not accepted yet) or load modules.
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
    """Returns the filter for this machine: an array of `struct sock_filter`, as `seccomp(2)` expects it. Call it only if `supported()`."""
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


def simulate(number: int, *arguments: int, arch: int) -> tuple[int, int]:
    """Returns (return value of the filter for system call `number`, number of executed instructions). Simulates the kernel, for tests."""
    program = list(struct.iter_unpack("=HBBI", filter_program()))
    data = struct.pack("=IIQ6Q", number, arch, 0, *(value % (1 << 64) for value in arguments[:6]), *[0] * (6 - len(arguments)))
    at = accumulator = step = 0
    while True:
        operation, if_true, if_false, value = program[at]
        at, step = at + 1, step + 1
        if operation == _LD_W_ABS:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif operation == _RET:
            return value, step
        elif operation == _JA:
            at += value
        elif operation == _AND:
            accumulator &= value
        else:
            holds = {_JEQ: accumulator == value, _JSET: accumulator & value != 0, _JGE: accumulator >= value}[operation]
            at += if_true if holds else if_false


def _conditional() -> dict[str, Block]:
    """Returns a mapping name -> instructions for the calls in `CONDITIONAL`."""
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
            *(_op(_AND, _CLONE_FILES | _CLONE_THREAD), _op(_JEQ, _CLONE_FILES, 0, 1)),  # the child would hold locks of a dead process
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
    """Returns instructions that allow a call if its argument at `offset` is in one of `ranges`. A range includes its first and its last
    value."""
    return _choice(offset, _each(ranges, _allow()), otherwise)


def _without(offset: int, flag: int, code: int) -> Block:
    """Returns instructions that allow a call unless `flag` is set in the argument at `offset`."""
    return (_op(_LD_W_ABS, offset), _op(_JSET, flag, 1, 0), *_allow(), *_answer(code))


def _kinds(protocols: dict[socket.SocketKind, int], no_protocol: Block) -> Block:
    """Returns instructions that allow the socket types in `protocols`, each with its protocol or 0.

    For any other combination of type and protocol, the kernel would run modprobe as root on the host.
    """
    unknown, raw = _answer(errno.ESOCKTNOSUPPORT), _answer(errno.EPERM)
    blocks = {int(kind): _permitted(_ARG2, ((0, 0), (number, number)), no_protocol) for kind, number in protocols.items()}
    steps: list[tuple[int, Block]] = [(0, unknown), *blocks.items(), (int(socket.SOCK_RAW), raw), (int(socket.SOCK_RAW) + 1, unknown)]
    return (_op(_LD_W_ABS, _ARG1), _op(_AND, _SOCKET_TYPE), *_search(steps))


def _each(ranges: Ranges, block: Block) -> dict[int, tuple[int, Block]]:
    return {first: (last, block) for first, last in ranges}


def _choice(offset: int, blocks: dict[int, tuple[int, Block]], otherwise: Block) -> Block:
    """Returns instructions that load the value at `offset` and run the block for this value. `blocks` maps first value -> (last value,
    block).

    `otherwise` runs for all other values.
    """
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
    """Returns instructions that find the step for the loaded value by binary search and run it."""
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
    """Returns instructions that make a call fail with `code` or, if `code` is 0, return 0 without effect."""
    return (_op(_RET, _ERRNO | code),)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
