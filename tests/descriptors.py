"""A process without free file descriptors."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def descriptors_left(free: int) -> Iterator[None]:
    """Limits this process to `free` more descriptors during the block."""
    taken = [os.open("/dev/null", os.O_RDONLY)]
    while taken[-1] < max(int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()):
        taken.append(os.open("/dev/null", os.O_RDONLY))
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1 + free, hard_limit))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
        for descriptor in taken:
            os.close(descriptor)
