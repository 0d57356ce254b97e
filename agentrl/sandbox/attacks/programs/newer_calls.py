"""Makes every system call that is newer than those which programs need, known to this kernel or not.

kind: escape
seconds: 20
"""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
needed = {424, 434, 436, 437, 439, 441, 452}  # pidfds, close_range, openat2, faccessat2, epoll_pwait2, fchmodat2
page = ctypes.create_string_buffer(4096)
heard = []
for number in sorted(set(range(424, 1024)) - needed):
    pid = os.fork()
    if pid == 0:
        answers = []
        for first in (0, ctypes.addressof(page)):
            ctypes.set_errno(0)
            answer = libc.syscall(number, first, first, first, 0, 0, 0)
            answers.append(answer == -1 and ctypes.get_errno() in (1, 38))  # EPERM, ENOSYS
        os._exit(0 if all(answers) else 1)
    if os.waitpid(pid, 0)[1]:
        heard.append(str(number))
print(f"ESCAPED: the kernel listens to calls {', '.join(heard)}" if heard else f"held: none of {1024 - 424 - len(needed)} calls heard")
