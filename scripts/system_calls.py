"""Prints the system calls of programs, and how the sandbox filter answers them: `python scripts/system_calls.py [--only WORD] [--free]`.

Runs everyday programs on this machine, under strace and the filter of sandboxes (`agentrl.sandbox.seccomp`). Prints whether each workload
works, the calls that the filter rejected, and all calls with their counts. `--free` runs the programs without the filter, to show which
calls they would make. The exit status is 1 if a workload fails under the filter. The list in `agentrl/sandbox/seccomp.py` contains these
calls and those that other versions of C libraries and runtimes make instead (glibc, musl, Go, Rust, the JVM). It contains no call whose
resources the kernel counts for the whole machine.

Requires strace. Runs compilers, git, node and perl if they are installed.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import errno
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agentrl.sandbox import seccomp
from agentrl.sandbox.inside.users import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, FilterProgram
from agentrl.sandbox.seccomp import ALLOWED, CONDITIONAL, FORBIDDEN, NO_OP, UNSUPPORTED

TIME_S = 300.0
ALLOW = 0x7FFF0000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {name: numbers for table in (ALLOWED, NO_OP, FORBIDDEN, CONDITIONAL, UNSUPPORTED) for name, numbers in table.items()}

WORKLOADS = Path(__file__).resolve().parent / "workloads"
RUN_BY = {".py": [sys.executable, "-I"], ".sh": ["sh"], ".bash": ["bash"], ".pl": ["perl"], ".js": ["node"]}


def workloads() -> list[Path]:
    """Returns the workloads whose programs are installed. A workload names its program in its first line."""
    return [path for path in sorted(WORKLOADS.iterdir()) if path.suffix in RUN_BY and _installed(path)]


def _installed(path: Path) -> bool:
    needs = re.search(r"Needs:? (\w+)", path.read_text().split("\n")[0])
    if needs is None:
        return True
    return importlib.util.find_spec(needs[1]) is not None if path.suffix == ".py" else shutil.which(needs[1], path=_path()) is not None


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def install_filter() -> None:
    """Installs the filter. Runs in the child, before it becomes strace's program."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = seccomp.filter_program()
    block = FilterProgram(len(code) // 8, code)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(block), 0, 0):
        raise OSError(ctypes.get_errno(), "the filter")


LINE = re.compile(r"^(?:\d+\s+)?(\w+)\((.*)")


def parsed(line: str) -> tuple[str, list[int]] | None:
    """Returns name and first arguments of a call in a line of `strace -X raw`; None for another kind of line."""
    match = LINE.match(line)
    if match is None:
        return None
    arguments = re.split(r" <unfinished|\)\s+=", match[2])[0].split(", ")[:3]
    return match[1], [value(word) for word in arguments]


def value(word: str) -> int:
    """Returns an argument as the kernel has it; 0 for arguments that strace prints in another form, which no filter reads."""
    if not re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", word):
        return 0
    return int(word, 16 if "x" in word else 8 if word.startswith("0") else 10) & (1 << 64) - 1


def refusal(name: str, arguments: list[int]) -> str:
    """Returns the filter's answer; empty if the call reaches the kernel."""
    machine = platform.machine()
    number = NUMBERS.get(name, (None, None))[0 if machine == "x86_64" else 1]
    if number is None:
        return "ENOSYS"
    answer, _ = seccomp.simulate(number, *arguments, arch=ARCH[machine])
    if answer == ALLOW:
        return ""
    code = answer & 0xFFFF
    return "done without" if code == 0 else next((key for key, value in vars(errno).items() if value == code), str(code))


def traced(workload: Path, folder: Path, free: bool) -> tuple[int, str, collections.Counter[str], collections.Counter[str]]:
    """Returns exit status, output, calls by name, and refused calls with their first arguments and the answer."""
    work = Path(tempfile.mkdtemp(dir=folder))
    log = work / "trace"
    filter_command = [] if free else [sys.executable, __file__, "--filtered"]
    command = ["strace", "-f", "-qq", "-X", "raw", "-s", "0", "-o", str(log), *filter_command, *RUN_BY[workload.suffix], str(workload)]
    environment = {"PATH": _path(), "LANG": "C.UTF-8", "TMPDIR": str(work), "HOME": str(work)}
    try:
        result = subprocess.run(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIME_S, check=False
        )
        status, output = result.returncode, result.stdout + result.stderr
    except subprocess.TimeoutExpired:
        status, output = -1, "no end"
    calls: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    lines = log.read_text(errors="replace").splitlines()
    started = [index for index, line in enumerate(lines) if "execve(" in line]
    for line in lines[started[0 if free else 1] :]:  # what is before is our own
        if (call := parsed(line)) is not None:
            name, arguments = call
            calls[name] += 1
            if answer := refusal(name, arguments):
                shown = f"({', '.join(hex(value) for value in arguments[:3])})" if name in CONDITIONAL else ""
                refused[f"{name}{shown} -> {answer}"] += 1
    return status, output, calls, refused


def main() -> int:
    if sys.argv[1:2] == ["--filtered"]:
        install_filter()
        os.execvp(sys.argv[2], sys.argv[2:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="run only workloads whose name contains this string")
    parser.add_argument("--free", action="store_true", help="run them without the filter")
    options = parser.parse_args()
    if not shutil.which("strace"):
        sys.exit("error: strace is not installed\n  fix: apt-get install strace")
    total: collections.Counter[str] = collections.Counter()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for workload in workloads():
            if options.only not in workload.name:
                continue
            status, output, calls, refused = traced(workload, Path(folder), options.free)
            total += calls
            failed += status != 0
            print(f"{workload.name:10} {'works' if status == 0 else 'FAILS'}  {len(calls):3} calls", flush=True)
            if status != 0:
                print("    " + "\n    ".join(output.strip().splitlines()[-12:]))
            for call, count in sorted(refused.items()):
                print(f"    rejected {count:4} times  {call}")
    print(f"\n{len(total)} calls in all: " + " ".join(f"{name}:{count}" for name, count in sorted(total.items())))
    print(f"\nallowed but not called: {' '.join(sorted(ALLOWED.keys() - total.keys()))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
