"""The attack suite: both backends contain every attack, and the suite detects the escapes from backends that are weak on purpose."""

import asyncio
import os
import platform
from dataclasses import replace
from types import SimpleNamespace

import pytest

from agentrl.errors import SandboxTimeout, SandboxUnavailable
from agentrl.records import SandboxSpec
from agentrl.sandbox import BubblewrapBackend, DockerBackend, limits, list_open, select_backend, server_code
from agentrl.sandbox.attacks import ATTACK_SPEC, load_attacks, run_attacks
from agentrl.sandbox.attacks.hostile_server import SLOW_TRICKS, replies
from agentrl.sandbox.attacks.suite import KINDS, PROGRAMS, STEPS, Attack, _Suite, hostile_server_source, program_attack
from agentrl.sandbox.lease import lease

SPEC = SandboxSpec(
    image="image",
    memory_mb=ATTACK_SPEC.memory_mb,
    processes=ATTACK_SPEC.processes,
    disk_mb=ATTACK_SPEC.disk_mb,
    open_files=ATTACK_SPEC.open_files,
)
pytestmark = pytest.mark.usefixtures("only_attacks")
docker = pytest.mark.docker
bubblewrap = pytest.mark.bubblewrap


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("docker", marks=docker), pytest.param("bubblewrap", marks=bubblewrap)])
async def test_every_attack_is_contained(name, root):
    backend = select_backend(name, run_label="test", root=root)
    try:
        results = await run_attacks(backend, SPEC)
    finally:
        await backend.close()
    assert [
        (result.name, result.verdict, result.evidence) for result in results if result.verdict not in ("contained", "not promised")
    ] == []
    assert {result.kind for result in results} == set(KINDS) and len(results) == len(load_attacks())
    if os.geteuid() == 0:
        promised = [result for result in results if result.evidence != "applies only to cells"]
        assert sum(result.verdict == "contained" for result in results) >= len(promised) - 2  # some need another kind of processor
    assert [sandbox for sandbox in list_open() if lease() in sandbox.name] == []


# Weak backends ---------------------------------------------------------------------------------------


class OnTheHostsNetwork(BubblewrapBackend):
    def _view(self, *arguments):
        return [word for word in super()._view(*arguments) if word != "--unshare-net"]


class WithManyFiles(BubblewrapBackend):
    def _options(self, *arguments):
        return {**super()._options(*arguments), "tmpfs": {}}


class OneUser(BubblewrapBackend):
    def _options(self, *arguments):
        options = super()._options(*arguments)
        return {**options, "agent": options["server"]}


class WithTheHostsFiles(WithManyFiles):
    def _view(self, *arguments):
        return [*super()._view(*arguments), "--ro-bind", "/tmp", "/tmp"]


class WithSharedInodes(BubblewrapBackend):
    def __init__(self, **options):
        super().__init__(**options)
        self._separates = False


class WithoutFilter(BubblewrapBackend):
    def _options(self, *arguments):
        return {**super()._options(*arguments), "filter": ""}


class WithAllTerminals(BubblewrapBackend):
    def _options(self, *arguments):
        return {**super()._options(*arguments), "terminals": "newinstance,ptmxmode=0666,mode=0620"}


class WithUnboundedTerminals(DockerBackend):
    def _describe(self, *arguments):
        return {**super()._describe(*arguments), "terminals": "newinstance,ptmxmode=0666,mode=0620"}


class WithTheDaemonsTerminals(DockerBackend):
    def _container(self, *arguments):
        container = super()._container(*arguments)
        mounts = [mount for mount in container["HostConfig"]["Mounts"] if mount["Target"] != "/dev/pts"]
        return {**container, "HostConfig": {**container["HostConfig"], "Mounts": mounts}}


def on_the_hosts_network(container):
    return {**container, "NetworkDisabled": False, "HostConfig": {**container["HostConfig"], "NetworkMode": "host", "Sysctls": {}}}


class ContainerOnTheHostsNetwork(DockerBackend):
    def _container(self, *arguments):
        return on_the_hosts_network(super()._container(*arguments))


class SharedContainerOnTheHostsNetwork(DockerBackend):
    def _describe(self, *arguments):
        return {**super()._describe(*arguments), "namespaces": ["mount", "uts", "ipc", "cgroup"], "settings": {}}

    def _shared_container(self, *arguments):
        return on_the_hosts_network(super()._shared_container(*arguments))


SINGLE = (WithTheDaemonsTerminals, ContainerOnTheHostsNetwork)  # one sandbox in each container
WEAK = [
    pytest.param(WithTheDaemonsTerminals, "terminals", "gets no terminal", marks=docker),
    pytest.param(ContainerOnTheHostsNetwork, "host_loopback", "connected to", marks=docker),
    pytest.param(OnTheHostsNetwork, "host_loopback", "connected to", marks=bubblewrap),
    pytest.param(WithSharedInodes, "watch_the_neighbours", "accesses by other sandboxes", marks=bubblewrap),
    pytest.param(WithTheHostsFiles, "host_through_proc", "a file of the host", marks=bubblewrap),
    pytest.param(WithUnboundedTerminals, "terminals", "gets no terminal", marks=docker),
    pytest.param(WithoutFilter, "access_lists", "MiB of the kernel's memory", marks=bubblewrap),
    pytest.param(WithoutFilter, "terminal_commands", "the terminal takes", marks=bubblewrap),
    pytest.param(WithoutFilter, "newer_calls", "the kernel listens", marks=bubblewrap),
    pytest.param(SharedContainerOnTheHostsNetwork, "host_loopback", "connected to", marks=docker),
]
if platform.machine() == "x86_64":
    WEAK += [
        pytest.param(WithoutFilter, "memory_policies", "policies", marks=bubblewrap),
        pytest.param(WithoutFilter, "asynchronous_io", "are taken", marks=bubblewrap),
        pytest.param(WithoutFilter, "filter_budget", "compiled", marks=bubblewrap),
    ]
if os.geteuid() == 0:  # bubblewrap without root does not promise these
    WEAK += [
        pytest.param(WithManyFiles, "fill_inodes", "no end", marks=bubblewrap),
        pytest.param(WithAllTerminals, "terminals", "gets no terminal", marks=bubblewrap),
        pytest.param(OneUser, "same_user_as_the_server", "both user", marks=bubblewrap),
    ]


@pytest.mark.parametrize(("weak", "name", "evidence"), WEAK)
async def test_weak_backend_is_detected(weak, name, evidence, root):
    backend, spec = weak(run_label="test", root=root), replace(SPEC, runtime="runc" if weak in SINGLE else "")
    try:
        (result,) = await run_attacks(backend, spec, only=name)
    finally:
        await backend.close()
    assert result.verdict == "ESCAPED" and evidence in result.evidence, result


@bubblewrap
async def test_watcher_does_not_report_its_own_file(root):
    (watcher,) = (attack for attack in load_attacks() if attack.name == "watch_the_neighbours")
    backend = BubblewrapBackend(run_label="test", root=root)
    try:
        sandbox = await backend.open(SPEC, timeout_s=60.0)
        await sandbox.exec(["python3", "-I", "-c", watcher.program], timeout_s=30.0)
        await asyncio.sleep(1.0)
        notes = await sandbox.read("seen", max_bytes=1 << 20)
        await asyncio.sleep(1.0)
        assert len(await sandbox.read("seen", max_bytes=1 << 20)) - len(notes) < 10_000, "the file grows although no program opens a file"
    finally:
        await backend.close()


@bubblewrap
async def test_memory_taken_by_other_processes_is_not_an_escape(root, monkeypatch):
    """The kernel reports the total of the machine: here 4 GiB more than before, although the sandbox takes no locks."""
    attacks = [attack for attack in load_attacks() if attack.name == "file_locks"]
    for original, replacement in (
        ("before = taken()", "before = taken() - 4096"),
        ("        lock(worker)", "        time.sleep(60)"),
        ("() + 60", "() + 1"),
    ):
        assert original in attacks[0].program
        attacks = [replace(attack, program=attack.program.replace(original, replacement)) for attack in attacks]
    monkeypatch.setattr("agentrl.sandbox.attacks.suite.load_attacks", lambda: attacks)
    backend = select_backend("bubblewrap", run_label="test", root=root)
    try:
        (result,) = await run_attacks(backend, SPEC, only="file_locks")
    finally:
        await backend.close()
    assert result.verdict == "contained", result


@pytest.mark.slow
@pytest.mark.parametrize("weak", [pytest.param(DockerBackend, marks=docker), pytest.param(BubblewrapBackend, marks=bubblewrap)])
@pytest.mark.parametrize(("name", "evidence"), [("file_locks", "in locks"), ("loopback_buffers", "in buffers")])
async def test_sandbox_without_counts_of_uncharged_memory_is_detected(weak, name, evidence, root, monkeypatch):
    """Even with the limits that do not depend on these counts."""
    source = server_code.source()
    for count in ("MAX_LOCKS = 4096", "MAX_SOCKETS = 1024"):
        assert count in source
        source = source.replace(count, count.partition("=")[0] + "= 1 << 40")
    reading = "while count <= MAX_LOCKS and"  # does not read the table either, which is long and blocked by each reader
    assert reading in source
    source = source.replace(reading, "while count < 0 and")
    monkeypatch.setattr(server_code, "source", lambda: source)
    # 8 MiB of locks suffice. A longer table would slow down the exec servers of other tests, which read it.
    attacks = [replace(attack, program=attack.program.replace('["memory_mb"] // 3', '["memory_mb"] // 24')) for attack in load_attacks()]
    assert name != "file_locks" or any("// 24" in attack.program for attack in attacks)
    monkeypatch.setattr("agentrl.sandbox.attacks.suite.load_attacks", lambda: attacks)
    monkeypatch.setattr(limits, "NETWORK_SETTINGS", {})
    monkeypatch.setattr(limits, "socket_bytes", lambda spec: 1 << 40)
    backend = weak(run_label="test", root=root)
    if backend.name == "bubblewrap" and os.geteuid() != 0 and name == "loopback_buffers":
        pytest.skip("without control groups it is not promised")
    try:
        (result,) = await run_attacks(backend, SPEC, only=name)
    finally:
        await backend.close()
    assert result.verdict == "ESCAPED" and evidence in result.evidence, result


@bubblewrap
async def test_proxy_without_checks_is_detected(root, monkeypatch):
    monkeypatch.setattr("agentrl.records.destinations.Destination.covers", lambda *_: True)
    monkeypatch.setattr("agentrl.sandbox.egress.requests.AllowList._listed", lambda *_: True)
    backend = BubblewrapBackend(run_label="test", root=root)
    try:
        (result,) = await run_attacks(backend, SPEC, only="egress_other_places")
    finally:
        await backend.close()
    assert result.verdict == "ESCAPED" and "127.0.0.1:" in result.evidence, result


@bubblewrap
async def test_gateway_without_limits_is_detected(root, monkeypatch):
    """uvicorn with httptools, which vLLM installs, has no limit; with h11 it has one."""
    parser = pytest.importorskip("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol
    monkeypatch.setattr("agentrl.gateway.http_server.bounded", lambda: parser)
    backend = BubblewrapBackend(run_label="test", root=root)
    try:
        (result,) = await run_attacks(backend, SPEC, only="egress_endless_heads")
    finally:
        await backend.close()
    assert result.verdict == "ESCAPED" and ("the gateway took" in result.evidence or "the driver grew" in result.evidence), result


@bubblewrap
async def test_program_that_fails_is_an_error(root, monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text('"""Breaks.\n\nkind: files\n"""\nraise SystemExit("oh")\n')
    monkeypatch.setattr("agentrl.sandbox.attacks.suite.PROGRAMS", tmp_path)
    backend = BubblewrapBackend(run_label="test", root=root)
    try:
        (result,) = await run_attacks(backend, SPEC, only="broken")
    finally:
        await backend.close()
    assert result.verdict == "error" and "oh" in result.evidence


@bubblewrap
async def test_program_that_a_busy_machine_cuts_off_gets_more_time(root, monkeypatch, tmp_path):
    program = '"""Comes late.\n\nkind: files\nseconds: 0.3\n"""\nimport time\ntime.sleep({})\nprint("held: at last")\n'
    (tmp_path / "late.py").write_text(program.format(1))
    (tmp_path / "never.py").write_text(program.format(100))
    monkeypatch.setattr("agentrl.sandbox.attacks.suite.PROGRAMS", tmp_path)
    monkeypatch.setattr("agentrl.sandbox.attacks.suite.BUSY_S", 2.0)
    backend = BubblewrapBackend(run_label="test", root=root)
    try:
        (late,) = await run_attacks(backend, SPEC, only="late")
        (never,) = await run_attacks(backend, SPEC, only="never")
    finally:
        await backend.close()
    assert (late.verdict, late.evidence) == ("contained", "at last")
    assert never.verdict == "error" and "2.3 s ended before it took effect" in never.evidence


@bubblewrap
async def test_runtime_needs_docker(root):
    backend = BubblewrapBackend(run_label="test", root=root)
    with pytest.raises(SandboxUnavailable, match=r"runsc.*needs Docker"):
        await backend.open(SandboxSpec(image="image", runtime="runsc"))
    await backend.close()


# Parts of the suite --------------------------------------------------------------------------------------------


def test_every_attack_has_a_description():
    every_attack = load_attacks()
    assert len({attack.name for attack in every_attack}) == len(every_attack) > 70
    for attack in every_attack:
        assert attack.description.endswith(".") and attack.seconds > 0, attack
        assert bool(attack.program) + bool(attack.trick) + (attack.name in ("hostile_archives", "cell_strangers")) == 1, attack
        assert not attack.host or attack.host in STEPS, attack


def test_programs_compile_and_print_evidence():
    for path in sorted(PROGRAMS.glob("*.py")):
        text = path.read_text()
        compile(text, str(path), "exec", dont_inherit=True)
        assert "held: " in text, path


def test_program_with_an_invalid_docstring_is_refused(tmp_path):
    for head in (
        "",
        "No kind.\n\nseconds: 1",
        "Wrong.\n\nkind: nonsense",
        "Wrong.\n\nkind: files\nsurprise: 1",
        "W.\n\nkind: files\nends: never",
        "W.\n\nkind: files\nrun: twice",
    ):
        path = tmp_path / "x.py"
        path.write_text(f'"""{head}\n"""\n')
        with pytest.raises(ValueError, match=r"x\.py"):
            program_attack(path)


def test_each_trick_is_implemented():
    tricks = [attack.trick for attack in load_attacks() if attack.trick]
    assert set(SLOW_TRICKS) < set(tricks)
    for trick in tricks:
        assert f"TRICK = '{trick}'" in hostile_server_source(trick)
        assert trick in (*replies(1), *SLOW_TRICKS, "half_a_frame", "flood", "empty_chunks", "endless_chunks")


@pytest.mark.parametrize("error, verdict", [(SandboxTimeout("no sandbox opened"), "error"), (TimeoutError(), "ESCAPED")])
async def test_only_a_driver_that_hangs_is_an_escape(error, verdict):
    """A `SandboxTimeout` is a `TimeoutError`, but the driver answered."""

    async def play(_):
        raise error

    suite = _Suite(None, SimpleNamespace(trouble=[], allowed=SimpleNamespace(trouble=[])), lambda result: None)
    assert (await suite._run(Attack(name="x", kind="files", description=""), play)).verdict == verdict
