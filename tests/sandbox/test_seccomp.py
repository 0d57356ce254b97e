"""The hand-made system call filter, interpreted in Python: what it refuses and what it lets through."""

import errno
import platform
import socket
import struct

import pytest

from agentrl.sandbox import seccomp

ALLOW, KILL = 0x7FFF0000, 0x80000000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}.get(platform.machine(), 0)
COLUMN = 0 if platform.machine() == "x86_64" else 1


def verdict(number, arg0=0, arch=ARCH, arg1=0):
    """What the kernel would do: a classic BPF interpreter for the instructions the filter uses."""
    data = struct.pack("=iIQ6Q", number, arch, 0, arg0, arg1, 0, 0, 0, 0)
    code = [struct.unpack("=HBBI", seccomp.program()[at : at + 8]) for at in range(0, len(seccomp.program()), 8)]
    at = accumulator = 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
        elif operation == 0x06:
            return value
        else:
            holds = {0x15: accumulator == value, 0x45: accumulator & value != 0, 0x35: accumulator >= value}[operation]
            at += if_true if holds else if_false


def refused(code):
    return 0x00050000 | code


@pytest.mark.parametrize("name", sorted(seccomp._DENIED))
def test_denied_calls_are_refused(name):
    number = seccomp._DENIED[name][COLUMN]
    assert verdict(number) == refused(errno.EPERM)


def test_ordinary_calls_pass():
    read, write, execve, getpid = [(0, 1, 59, 39), (63, 64, 221, 172)][COLUMN]
    assert {verdict(number) for number in (read, write, execve, getpid)} == {ALLOW}


def test_clone_may_make_threads_and_children_but_no_namespaces():
    clone = seccomp._CLONE[COLUMN]
    assert verdict(clone, 0x01200011) == ALLOW and verdict(clone, 0x003D0F00) == ALLOW
    for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000):
        assert verdict(clone, flag | 17) == refused(errno.EPERM)


def test_only_local_and_ip_sockets():
    number = seccomp._SOCKET[COLUMN]
    assert {verdict(number, family) for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)} == {ALLOW}
    assert {verdict(number, family) for family in (16, 17, 38, 40)} == {refused(errno.EAFNOSUPPORT)}  # netlink, packet, alg, vsock


def test_what_would_keep_kernel_memory_is_absent_or_small():
    assert {verdict(numbers[COLUMN]) for numbers in seccomp._ABSENT.values()} == {refused(errno.ENOSYS)}
    shmget = seccomp._SHMGET[COLUMN]
    assert verdict(shmget, arg1=56) == verdict(shmget, arg1=4096) == ALLOW
    for size in (4097, 1 << 31, 1 << 32, (1 << 40) + 1):
        assert verdict(shmget, arg1=size) == refused(errno.EINVAL)


def test_other_architectures_are_killed():
    assert verdict(0, arch=0x40000003) == KILL
