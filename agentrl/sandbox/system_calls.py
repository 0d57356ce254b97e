"""The system calls of a sandbox, by name and by number: what programs there may call, and how the rest is refused.

Each word is `name:x86_64:aarch64`, with `-` where an architecture lacks the call. Numbers never change once a kernel has them
(`asm/unistd_64.h`, `asm-generic/unistd.h`). What stands nowhere here, and with it every call that kernels have yet to get, does not
exist in a sandbox: it answers ENOSYS, for which libraries have another way. `scripts/system_calls.py` shows what programs need.

Left out for reasons that a reader may look for here, all ENOSYS:

    clone3                              its flags are behind a pointer; libraries fall back to clone, whose flags are looked at
    io_setup, io_submit, ...            contexts are counted for the whole machine, and one sandbox can take them all
    io_uring_*                          a second way to every call, past a filter
    seccomp                             compiled filters come out of one budget of the whole machine; so no sandbox within a sandbox
    landlock_*                          rights of a sandbox within a sandbox, likewise
    semget, msgget, mq_open             queues and semaphores of the kernel's, most of which outlive their programs
    statmount, listmount, open_tree_attr, setxattrat, futex_wait, mseal, memfd_secret, map_shadow_stack, cachestat, lsm_*
                                        newer calls that nothing needs yet
    vmsplice, tee, remap_file_pages, process_madvise, modify_ldt
                                        rare ways to do what other calls do
"""

from __future__ import annotations

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
# users and rights: what no capability stands behind can only be given up
getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158 setuid:105:146
setgid:106:144 setreuid:113:145 setregid:114:143 setresuid:117:147 setresgid:119:149 setfsuid:122:151 setfsgid:123:152
setgroups:116:159 capget:125:90 capset:126:91
# time and the machine
time:201:- gettimeofday:96:169 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 nanosleep:35:101 alarm:37:-
getitimer:36:102 setitimer:38:103 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109
timer_delete:226:111 uname:63:160 sysinfo:99:179 getrandom:318:278
# sockets, whose families and options are looked at below
bind:49:200 connect:42:203 listen:50:201 accept:43:202 accept4:288:242 getsockname:51:204 getpeername:52:205 shutdown:48:210
sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 sendmmsg:307:269 recvmmsg:299:243 getsockopt:55:209
""")
"""What programs call, whatever the arguments."""

CONDITIONAL = _table("""
clone:56:220 socket:41:198 socketpair:53:199 setsockopt:54:208 fcntl:72:25 ioctl:16:29 prctl:157:167 shmget:29:194 mmap:9:222
memfd_create:319:279
personality:135:92
""")
"""What depends on arguments (see `agentrl.sandbox.seccomp`)."""

NO_OP = _table("""
sync:162:81 syncfs:306:267
""")
"""Answered 0 without being done: files of a sandbox lie in memory, and the kernel would write out those of the whole machine."""

UNSUPPORTED = _table("""
setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7
""")
"""Answered as by a file system that has none: kernel memory of access control lists is charged to nobody. `cp -a` and `tar` go on."""

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
"""Answered EPERM, as to a user without the right: programs know what that means."""
