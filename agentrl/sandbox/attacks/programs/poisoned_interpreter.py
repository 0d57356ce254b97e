"""Changes the warm interpreter it was given: builtins, modules, hooks, the garbage collector, signal handlers, memory.

kind: grader
seconds: 10
"""

import atexit
import builtins
import gc
import os
import signal
import sys

builtins.print("held: poisoned", flush=True)
for module in list(sys.modules.values()):
    for name in ("loads", "dumps", "reader", "open", "sum", "exit"):
        try:
            setattr(module, name, lambda *a, **k: None)
        except (AttributeError, TypeError):
            continue
sys.path.insert(0, "/home/agent")
sys.meta_path.clear()
sys.setrecursionlimit(50)
sys.settrace(lambda *a: None)
gc.disable()
atexit.register(lambda: None)
for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
os.umask(0)
os.chdir("/tmp")
for other in gc.get_objects()[:20000]:
    if type(other).__name__ in ("Server", "Link"):
        try:
            other.__dict__.clear()
        except AttributeError:
            continue
