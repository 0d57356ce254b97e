"""The system call filter, interpreted in Python: which calls it allows, and how it refuses the others."""

import errno
import importlib.util
import os
import platform
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandbox import seccomp
from agentrl.sandbox.seccomp import ALLOWED, CONDITIONAL, FORBIDDEN, NO_OP, UNSUPPORTED

ALLOW, KILL = 0x7FFF0000, 0x80000000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}.get(platform.machine(), 0)
COLUMN = 0 if platform.machine() == "x86_64" else 1
TABLES = (ALLOWED, NO_OP, UNSUPPORTED, FORBIDDEN, CONDITIONAL)
HEADERS = {"x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), "generic": Path("/usr/include/asm-generic/unistd.h")}
CODE = list(struct.iter_unpack("=HBBI", seccomp.filter_program()))
DONE_NOTHING = 0x00050000


def simulate(number, *arguments, arch=ARCH):
    return seccomp.simulate(number, *arguments, arch=arch)


def verdict(number, *arguments, **options):
    return simulate(number, *arguments, **options)[0]


def refused(code):
    return 0x00050000 | code


def judged(name, *arguments):
    return verdict(CONDITIONAL[name][COLUMN], *arguments)


def numbers(table):
    return {value[COLUMN] for value in table.values()} - {None}


def test_tables_do_not_overlap():
    names = [name for table in TABLES for name in table]
    assert len(names) == len(set(names)) > 300
    for column in (0, 1):
        numbers_used = [value[column] for table in TABLES for value in table.values() if value[column] is not None]
        assert len(numbers_used) == len(set(numbers_used)) > 250


@pytest.mark.parametrize("arch", ["x86_64", "generic"])
def test_numbers_match_the_kernel_headers(arch):
    """Compares with the headers of the C library's package, if installed, without newer calls."""
    if not HEADERS[arch].exists():
        pytest.skip(f"no {HEADERS[arch]}; it comes with the C library's headers")
    text = HEADERS[arch].read_text()
    header_numbers = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    for name, wide_name in re.findall(r"#define __NR_(\w+) __NR3264_(\w+)", text):  # on architectures with native 64 bits
        if wide_name in header_numbers:
            header_numbers.setdefault(name, header_numbers[wide_name])
    table_numbers = {name: value[0 if arch == "x86_64" else 1] for table in TABLES for name, value in table.items()}
    compared = {name: number for name, number in table_numbers.items() if number is not None and name in header_numbers}
    assert len(compared) > 250 and compared == {name: header_numbers[name] for name in compared}
    assert {name for name, number in table_numbers.items() if number is not None} - header_numbers.keys() <= {"fchmodat2"}
    assert {name for name, number in table_numbers.items() if number is None} & header_numbers.keys() == set()


@pytest.mark.slow
def test_every_number_has_the_right_answer():
    expected = dict.fromkeys(range(4096), refused(errno.ENOSYS))
    expected |= dict.fromkeys(numbers(ALLOWED), ALLOW) | dict.fromkeys(numbers(NO_OP), DONE_NOTHING)
    expected |= dict.fromkeys(numbers(FORBIDDEN), refused(errno.EPERM)) | dict.fromkeys(numbers(UNSUPPORTED), refused(errno.EOPNOTSUPP))
    assert {number: verdict(number) for number in expected if number not in numbers(CONDITIONAL)} == {
        number: answer for number, answer in expected.items() if number not in numbers(CONDITIONAL)
    }
    assert {verdict(number) for number in range(500, 1024)} == {refused(errno.ENOSYS)}  # future calls


@given(st.integers(min_value=0, max_value=(1 << 32) - 1), st.lists(st.integers(min_value=0, max_value=(1 << 64) - 1), max_size=6))
def test_filter_takes_few_steps(number, arguments):
    answer, steps = simulate(number, *arguments)
    assert answer == ALLOW or answer >> 16 == 5
    assert steps < 40
    if number >= 512:
        assert answer == refused(errno.ENOSYS)  # also the second numbering of x86_64, from 0x40000000


NEVER = {  # x86_64's number, and that of the other architectures
    "setxattr": (188, 5),
    "io_setup": (206, 0),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "seccomp": (317, 277),
    "clone3": (435, 435),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}


@pytest.mark.parametrize("name", NEVER)
def test_calls_that_use_uncharged_memory_are_refused(name):
    assert verdict(NEVER[name][COLUMN], 1, 1, 1) not in (ALLOW, DONE_NOTHING)


def test_clone_may_create_threads_and_children_but_no_namespaces():
    assert judged("clone", 0x01200011) == judged("clone", 0x003D0F00) == ALLOW
    for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x80):
        assert judged("clone", flag | 17) == refused(errno.EPERM)
    assert judged("clone", 0x400 | 17) == judged("clone", 0x500 | 17) == refused(errno.EPERM)  # a child with its parent's descriptors
    assert judged("clone", 0x4111) == ALLOW  # vfork


def test_only_unix_and_ip_sockets_with_common_protocols_are_allowed():
    for family in range(1, 64):
        expected = ALLOW if family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6) else refused(errno.EAFNOSUPPORT)
        assert judged("socket", family, socket.SOCK_STREAM, 0) == expected
        assert judged("socketpair", family) == (ALLOW if family == socket.AF_UNIX else refused(errno.EAFNOSUPPORT))
    for family in (socket.AF_INET, socket.AF_INET6):
        for protocol in (1, 33, 58, 132, 136, 255, 262):  # ping, DCCP, SCTP, UDP-Lite, raw, MPTCP
            assert judged("socket", family, socket.SOCK_STREAM, protocol) == refused(errno.EPROTONOSUPPORT)
        assert judged("socket", family, socket.SOCK_STREAM, socket.IPPROTO_TCP) == ALLOW
        assert judged("socket", family, socket.SOCK_DGRAM, socket.IPPROTO_UDP) == ALLOW
    assert judged("socket", socket.AF_INET | 1 << 32, socket.SOCK_STREAM, 262 | 1 << 40) == refused(errno.EPROTONOSUPPORT)


def test_no_socket_loads_a_module():
    for family in (socket.AF_INET, socket.AF_INET6):
        for kind in (0, 4, 5, 6, 10, 15):
            assert judged("socket", family, kind, 0) == judged("socket", family, kind | 0x80000, 0) == refused(errno.ESOCKTNOSUPPORT)
        assert judged("socket", family, socket.SOCK_STREAM, socket.IPPROTO_UDP) == refused(errno.EPROTONOSUPPORT)
        assert judged("socket", family, socket.SOCK_DGRAM, socket.IPPROTO_TCP) == refused(errno.EPROTONOSUPPORT)
        assert judged("socket", family, socket.SOCK_RAW, socket.IPPROTO_UDP) == refused(errno.EPERM)
        assert judged("socket", family, socket.SOCK_STREAM | 0x80800, 0) == judged("socket", family, socket.SOCK_DGRAM | 0x800, 17) == ALLOW
    for kind in (1, 2, 5, 0x80001):
        assert judged("socket", socket.AF_UNIX, kind, 0) == ALLOW
    assert judged("ioctl", 3, 0x8940) == judged("ioctl", 3, 0x8941) == refused(errno.ENOTTY)  # bridges


def test_huge_pages_are_refused():
    assert judged("mmap", 0, 1 << 21, 3, 0x40022) == judged("mmap", 0, 1 << 21, 3, 21 << 26 | 0x40022) == refused(errno.ENOMEM)
    assert judged("mmap", 0, 1 << 21, 3, 0x22) == judged("mmap", 0, 1 << 21, 3, 0x2) == ALLOW
    assert judged("memfd_create", 0, 4) == judged("memfd_create", 0, 5) == refused(errno.EINVAL)
    assert judged("memfd_create", 0, 3) == ALLOW
    assert judged("shmget", 0, 4096, 0o4600) == refused(errno.EPERM)


def test_only_usual_socket_options_are_allowed():
    names = ("SO_REUSEADDR", "SO_BROADCAST", "SO_KEEPALIVE", "SO_LINGER", "SO_REUSEPORT", "SO_RCVTIMEO", "SO_SNDTIMEO", "SO_PASSCRED")
    for option in (getattr(socket, name) for name in names):
        assert judged("setsockopt", 3, socket.SOL_SOCKET, option) == ALLOW
    for option in (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_CORK, socket.TCP_QUICKACK, socket.TCP_USER_TIMEOUT):
        assert judged("setsockopt", 3, socket.IPPROTO_TCP, option) == ALLOW
    assert judged("setsockopt", 3, socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == ALLOW
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        assert judged("setsockopt", 3, socket.SOL_SOCKET, option) == DONE_NOTHING
    filters, forced, zerocopy, ulp, md5, membership = (26, 50, 51, 52), (32, 33), 60, (6, 31), (6, 14), (0, 35)
    assert judged("setsockopt", 3, socket.SOL_SOCKET, socket.SO_RCVLOWAT) == refused(errno.ENOPROTOOPT)  # raises SO_RCVBUF
    for level, option in [*((1, option) for option in (*filters, *forced, zerocopy)), ulp, md5, membership, (263, 1), (17, 103), (284, 1)]:
        assert judged("setsockopt", 3, level, option) == refused(errno.ENOPROTOOPT)


def test_leases_notifications_and_open_file_locks_are_refused():
    for command in (36, 37, 38, 1024, 1026, 1029, 1039, 1040, 5000):
        assert judged("fcntl", 3, command) == refused(errno.EINVAL)
    for command in (*range(12), 1030, 1031, 1032, 1033, 1034):
        assert judged("fcntl", 3, command) == ALLOW


def test_terminal_input_and_line_disciplines_are_refused():
    tiocsti, tioclinux, tioccons, tiocsetd = 0x5412, 0x541C, 0x541D, 0x5423
    for command in (tiocsti, tioclinux, tioccons, tiocsetd, tiocsti | 1 << 32, 0x89A0, 0x8946, 0x8982, 0x40086602, 0xC0045878):
        assert judged("ioctl", 0, command) == refused(errno.ENOTTY)
    tcgets, tiocgwinsz, tiocswinsz, fionread, fionbio, tiocsctty, tiocgptn, siocgifconf, fioclex = (
        *(0x5401, 0x5413, 0x5414, 0x541B, 0x5421, 0x540E, 0x80045430, 0x8912, 0x5451),
    )
    for command in (tcgets, tiocgwinsz, tiocswinsz, fionread, fionbio, tiocsctty, tiocgptn, siocgifconf, fioclex):
        assert judged("ioctl", 0, command) == ALLOW


def test_process_properties():
    pdeathsig, dumpable, name, reaper, no_new_rights, keepcaps = 1, 4, 15, 36, 38, 8
    for option in (pdeathsig, dumpable, name, reaper, no_new_rights, keepcaps):
        assert judged("prctl", option) == ALLOW
    seccomp_filter, memory_map, core_scheduling, name_of_memory, tracer, merge, futex_slots = 22, 35, 62, 0x53564D41, 0x59616D61, 67, 78
    for option in (seccomp_filter, memory_map, core_scheduling, name_of_memory, tracer, merge, futex_slots):
        assert judged("prctl", option) == refused(errno.EINVAL)
    assert judged("personality", 0xFFFFFFFF) == ALLOW
    assert judged("personality", 0x0040000) == judged("personality", 0) == refused(errno.EPERM)


def test_shared_segments_are_small():
    assert judged("shmget", 0, 56) == judged("shmget", 0, 4096) == ALLOW
    for size in (4097, 1 << 31, 1 << 32, (1 << 40) + 1):
        assert judged("shmget", 0, size) == refused(errno.EINVAL)


def test_other_architectures_are_killed():
    assert verdict(0, arch=0x40000003) == KILL


def test_kernel_accepts_the_filter():
    assert len(CODE) < 4096
    for index, (operation, if_true, if_false, value) in enumerate(CODE):
        if operation in (0x15, 0x45, 0x35):
            assert index + 1 + max(if_true, if_false) < len(CODE)
        elif operation == 0x05:
            assert index + 1 + value < len(CODE)


# The script that reports system calls ---------------------------------------------------------------------------------

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script():
    spec = importlib.util.spec_from_file_location("system_calls_script", SCRIPTS / "system_calls.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_parses_strace_output():
    calls = script()
    assert calls.parsed("29526 ioctl(0, 0x5401, 0x7ffccb1c5ab0)  = -1 ENOTTY (x)") == ("ioctl", [0, 0x5401, 0x7FFCCB1C5AB0])
    assert calls.parsed("7 mkdir(0x5581, 0777) = 0") == ("mkdir", [0x5581, 0o777])
    assert calls.parsed("7 fcntl(3, 0x400 <unfinished ...>") == ("fcntl", [3, 0x400])
    assert calls.parsed('7 openat(-100, "x", 0) = 3') == ("openat", [(1 << 64) - 100, 0, 0])
    assert calls.parsed("7 <... read resumed>) = 1") is None and calls.parsed("7 +++ exited with 0 +++") is None
    assert calls.refusal("ioctl", [0, 0x5401, 0]) == "" and calls.refusal("ioctl", [0, 0x5412, 0]) == "ENOTTY"
    assert calls.refusal("a_call_to_come", []) == "ENOSYS" and calls.refusal("sync", []) == "done without"


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["everyday.py", "compilers.sh", "shell.sh", "shell.bash", "versions.sh", "scripts.pl", "scripts.js"])
def test_usual_programs_work_under_the_filter(workload, tmp_path):
    calls = script()
    path = SCRIPTS / "workloads" / workload
    if path not in calls.workloads():
        pytest.skip(f"{workload} needs a program that is not installed")
    command = [sys.executable, str(SCRIPTS / "system_calls.py"), "--filtered", *calls.RUN_BY[path.suffix], str(path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout[-500:] + result.stderr[-1000:]
