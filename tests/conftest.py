"""For all tests.

Tests run on a few workers (`make test`). A file's tests stay on one of them, since what they share is made once for a file. Those that
start an inference server take turns on one worker: two servers at once want more than two cores, and the real one of tests/serving is
shared. So do those of sandboxes: an attack on a weak one takes from the whole machine; checks of tasks, which open many, stay out of it, or
that worker would end long after the others. The learner's tests share a process that has imported what learners need; with them go those
that load a model or its tokenizer, which imports as much: four seconds of a worker, so no test file does it at its top. What takes longest
begins first; the pretrained model, though it is served too, on whichever worker is free first, or the one that has the servers would end
long after the others.

What a property test may take depends on the machine, so hypothesis measures no time. `make test-unit` takes the profile `quick`; the
whole suite draws as many examples as hypothesis does by itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
import typer.testing
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

gc.disable()  # while test files are imported, see pytest_collection_finish

settings.register_profile("agentrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("agentrl"), max_examples=10)
settings.load_profile("agentrl")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell starts in the background, where nobody can press ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

TOGETHER = {
    "e2e": "servers",
    "serving": "servers",
    "model/test_smollm2.py": "pretrained",
    "sandbox": "sandboxes",
    **dict.fromkeys(("learner", "model", "supervised"), "learner"),
    **dict.fromkeys(("agent/test_escaping.py", "agent/test_template.py", "cli/test_model.py"), "learner"),
    **dict.fromkeys(("session/test_chat_template.py", "sandboxes/test_tables_base_model.py", "benchmarks/test_learner.py"), "learner"),
    **dict.fromkeys(("test_architecture.py", "base/test_unpickled.py"), "sources"),
    **dict.fromkeys(("experience/test_store.py", "version/test_registry.py"), "learner"),  # they fork from the same server
    "gateway": "gateway",  # the SDKs of others: two seconds of imports
    **dict.fromkeys(("rewards", "reward/test_configured.py"), "rewards"),  # verifiers keep processes that have imported sympy and others
}
LONG = ("check/test_check.py", "task/test_harbor.py", "reward/test_cleanroom.py", "rollout/test_every_await.py")  # a minute and more
FIRST = ("servers", "sandboxes", "learner", "pretrained", *LONG, "gateway", "rewards")
LAST_OF_ITS_GROUP = "sandbox/test_attacks.py"
CLONE_NEWNS = 0x20000  # mount_namespaces(7)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped fails, as in CI, where everything is installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[misc, assignment]
    if report.skipped and item.config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"skipped, although nothing may be missing here (--no-skips): {reason}"
    return report  # type: ignore[return-value]


def group_of(nodeid: str) -> str:
    """The tests that this one shares a worker with."""
    file = nodeid.partition("::")[0].removeprefix("tests/")
    return TOGETHER.get(file) or TOGETHER.get(file.partition("/")[0], file)


class ByGroup(LoadScopeScheduling):
    """pytest-xdist's own way to keep tests by a mark (`--dist loadgroup`) has no effect under pytest 9."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByGroup:
    config.option.loadscopereorder = False
    return ByGroup(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(n)` all but each n-th parameter are slow. Puts the long ones first where workers share them."""
    seen: dict[str, int] = {}
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None:
            test = item.nodeid.partition("[")[0]
            seen[test] = seen.get(test, -1) + 1
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: (_rank(group_of(item.nodeid)), LAST_OF_ITS_GROUP in item.nodeid))


def _rank(group: str) -> int:
    return FIRST.index(group) if group in FIRST else len(FIRST)


def pytest_collection_finish() -> None:
    """What has been imported by now stays: the garbage collector need not look through torch, neither meanwhile nor again and again."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread for torch in this process: the tensors here are tiny, and threads that wait for each other cost more than they give."""
    if "torch" in sys.modules and sys.modules["torch"].get_num_threads() != 1:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def one_command_line() -> Iterator[None]:
    """typer makes all commands anew for each call, as long as no process makes two: most of what a call in this process takes."""
    made = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", made)
        patch.setattr(typer.testing, "_get_command", made)
        yield


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat templates are tried in forked processes. That the process of its own does the same tests/agent/test_template.py shows."""
    from tests.forking import tried

    monkeypatch.setattr("agentrl.agent.template._run_child", tried)


@pytest.fixture
def only_attacks() -> Iterator[None]:
    """For a suite of attacks: meanwhile no other one runs. What the kernel holds for all, such as file locks, they use up and measure."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def own_mounts() -> Iterator[None]:
    """For a test that mounts a file system: this process and those it starts see it, and no other. Takes root.

    A test that takes a new mount of the machine for an escape may so run beside it.
    """
    libc, before, folder = ctypes.CDLL(None, use_errno=True), os.open("/proc/thread-self/ns/mnt", os.O_RDONLY), Path.cwd()
    try:
        if libc.unshare(CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "unshare failed")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        yield
    finally:
        left = libc.setns(before, CLONE_NEWNS)
        os.close(before)
        os.chdir(folder)  # which setns changes
    assert left == 0, os.strerror(ctypes.get_errno())
