"""Fixtures, markers and scheduling for all tests.

`make test` runs the tests on several workers. The tests of a file run on one worker because they share fixtures. `TOGETHER` assigns more
files to one worker:

- Files that use the same expensive fixture, such as a preloaded process or a server, so that it starts once.
- Files whose imports take seconds, such as torch. A test module does not import those at its top, or every worker would pay for them.
- Attacks on sandboxes, which measure resources of the whole machine.

Groups in `FIRST` start first, because they take longest; otherwise one of them would still run when the other workers have finished.

Hypothesis checks no deadline, because the duration of an example depends on the machine. It draws 30 examples, different ones in each run;
`make test-unit` uses the profile `quick`, which draws 10.
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

gc.disable()  # until pytest_collection_finish: collections during imports cost time and free nothing

settings.register_profile("agentrl", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("agentrl"), max_examples=10)
settings.load_profile("agentrl")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs like this
    signal.signal(signal.SIGINT, signal.default_int_handler)

TOGETHER = {
    "e2e": "runs",  # most fork their servers and learners from the same hosts
    **dict.fromkeys(("e2e/test_init.py", "e2e/test_chaos.py", "thirdparty", "serving"), "servers"),
    "model/test_smollm2.py": "pretrained",
    "sandbox": "sandboxes",
    **dict.fromkeys(("learner", "model", "objective", "supervised"), "learner"),
    **dict.fromkeys(("agent/test_escaping.py", "agent/test_images.py", "agent/test_template.py", "cli/test_model.py"), "learner"),
    **dict.fromkeys(("session/test_chat_template.py", "sandboxes/test_tables_base_model.py", "benchmarks/test_learner.py"), "learner"),
    **dict.fromkeys(("test_architecture.py", "base/test_unpickled.py"), "sources"),
    **dict.fromkeys(("experience/test_store.py", "version/test_registry.py"), "learner"),  # use the same fork server
    "view": "view",  # use the same browser and the same runs
    "gateway": "gateway",  # importing the providers' SDKs takes two seconds
    **dict.fromkeys(("rewards", "reward/test_configured.py"), "rewards"),  # use the same preloaded verifier processes
}
LONG = ("check/test_check.py", "task/test_harbor.py", "reward/test_cleanroom.py", "rollout/test_every_await.py")  # a minute or more each
FIRST = ("runs", "servers", "sandboxes", "learner", "pretrained", *LONG, "gateway", "rewards")
LAST_OF_ITS_GROUP = "sandbox/test_attacks.py"
DRIVER = ("tests/evaluation/test_canary", "tests/evaluation/test_versus", "tests/gate/", "tests/run/", "tests/serving/")
"""Tests of what runs on the event loop of a driver."""
CLONE_NEWNS = 0x20000  # mount_namespaces(7)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="treat a skipped test as a failure; for CI, where everything is installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[misc, assignment]
    if report.skipped and item.config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"skipped, which --no-skips forbids: {reason}"
    return report  # type: ignore[return-value]


def group_of(nodeid: str) -> str:
    """Returns the name of the group of tests that run on one worker with this test."""
    file = nodeid.partition("::")[0].removeprefix("tests/")
    return TOGETHER.get(file) or TOGETHER.get(file.partition("/")[0], file)


class ByGroup(LoadScopeScheduling):
    """Keeps each group of tests on one worker. xdist's `--dist loadgroup` has no effect under pytest 9."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByGroup:
    config.option.loadscopereorder = False
    return ByGroup(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all parameters of a `sampled(n)` test except every n-th as slow. With several workers, sorts the longest groups first."""
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
    """Excludes imported modules from garbage collection: scanning torch again and again takes seconds."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Limits torch to one thread in this process: for tiny tensors, synchronizing threads costs more than it saves."""
    if "torch" in sys.modules and sys.modules["torch"].get_num_threads() != 1:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def one_command_line() -> Iterator[None]:
    """Builds typer's command tree once per process instead of once per call, which would take most of the time of a call."""
    get_command = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", get_command)
        patch.setattr(typer.testing, "_get_command", get_command)
        yield


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes chat templates in forked processes, which is faster. tests/agent/test_template.py tests the real child process."""
    from tests.forking import tried

    monkeypatch.setattr("agentrl.agent.template._run_child", tried)


@pytest.fixture(autouse=True)
def blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test of the driver's parts in which one of them blocks its event loop. See `tests.off_loop`."""
    if not request.node.nodeid.startswith(DRIVER):
        yield
        return
    from tests.off_loop import BlockingCalls

    with pytest.MonkeyPatch.context() as patch:
        calls = BlockingCalls(patch)
        yield
    assert not calls.on_loop, "\n".join(dict.fromkeys(calls.on_loop))


@pytest.fixture
def only_attacks() -> Iterator[None]:
    """Runs one attack suite at a time, because attacks use up and measure resources of the kernel, such as file locks."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def own_mounts() -> Iterator[None]:
    """Gives this process a private mount namespace, so that a test can mount a file system. Needs root.

    Otherwise a sandbox test that runs at the same time would take the new mount for an escape.
    """
    libc, before, folder = ctypes.CDLL(None, use_errno=True), os.open("/proc/thread-self/ns/mnt", os.O_RDONLY), Path.cwd()
    try:
        if libc.unshare(CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "unshare failed")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        yield
    finally:
        result = libc.setns(before, CLONE_NEWNS)
        os.close(before)
        os.chdir(folder)  # which setns changes
    assert result == 0, os.strerror(ctypes.get_errno())
