"""Starting, stopping and killing the learner, and the files that remain. The steps are real, on a tiny policy."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from safetensors import safe_open

from agentrl.config import Recipe
from agentrl.errors import DiskFull, LearnerError, UserError
from agentrl.experience import SqliteStore
from agentrl.experience.audit import count, verify
from agentrl.experience.step_uses import CONSUMED_FILE, read_steps
from agentrl.learner import LearnerProcess
from agentrl.records import Blame, Failure, Group, LateScore, PendingPart, Probe, Score, codec
from agentrl.rollout import excluded_group
from agentrl.version import FolderRegistry
from tests.learner import preloaded
from tests.learner.building import build_recipe, random_group, write_policy, write_run
from tests.ledgers import consumed
from tests.waiting import until, wait_until

pytestmark = pytest.mark.deepspeed
MakeLearner = Callable[[Path, Recipe], LearnerProcess]


def _command_lines() -> list[str]:
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return lines


def _listening(argument: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Addresses at which the processes with `argument` on their command line wait for connections."""
    processes = [process for process in psutil.process_iter(["cmdline"]) if argument in (process.info["cmdline"] or ())]  # None if ending
    sockets = [sock for process in processes for sock in process.net_connections("inet") if sock.status == psutil.CONN_LISTEN]
    return [ipaddress.ip_address(sock.laddr.ip) for sock in sockets]


async def test_steps_run_as_groups_arrive_and_stop_is_clean(tmp_path: Path) -> None:
    recipe = build_recipe()
    write_run(tmp_path, recipe, [random_group(index) for index in range(3)])
    learner = LearnerProcess(tmp_path, recipe)
    registry = FolderRegistry(tmp_path / "versions")
    await learner.start()
    with pytest.raises(LearnerError, match="already running"):
        await learner.start()
    try:
        await until(lambda: registry.get(1) is not None, 600.0)
        assert learner.alive, "the learner waits for the groups of step 1"
        addresses = _listening(str(tmp_path))
        assert addresses and all(address.is_loopback for address in addresses), addresses
        await learner.stop(grace_s=300)
    finally:
        await learner.kill()
    assert learner.returncode == 0
    assert "stopped before step 1" in learner.log_tail()
    assert not any(str(tmp_path) in line for line in _command_lines())

    store = SqliteStore(tmp_path / "experience.sqlite")
    assert consumed(store) == {0: 0, 1: 0, 2: 0}
    for index in range(3, 5):
        store.put(random_group(index, scores=[1.0] * 4))  # no preference: version 2 has the same weights
    broken = Failure(stage="task", blame=Blame.TASK, kind="TaskError", message="no such tool")
    store.put(excluded_group(5, "t5", "k5", broken, size=4))
    await learner.start()
    await learner.wait(timeout_s=600)
    first, second = registry.get(1), registry.get(2)
    assert first is not None
    assert second is not None
    assert first.sha256 == second.sha256
    assert consumed(store) == {index: index // 3 for index in range(6)}
    update = (tmp_path / "versions" / "000002" / "update.json").read_text()
    assert '"weights_changed": 0.0' in update
    assert '"groups_all_equal": 2.0' in update and '"groups_broken_task": 1.0' in update
    store.close()
    _check_export(tmp_path / "versions" / "000001")


def _check_export(folder: Path) -> None:
    """The folder loads as a Hugging Face model, and the probe has the logprobs of the loaded weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    probe = codec.from_json(Probe, (folder / "probe.json").read_bytes())
    assert len(probe.token_ids) == 3
    for ids, logprobs in zip(probe.token_ids, probe.logprobs, strict=True):
        row = torch.tensor([ids])
        with torch.no_grad():
            expected = model(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
        assert (expected - torch.tensor(logprobs)).abs().max() < 1e-5
    base = transformers.AutoModelForCausalLM.from_pretrained(folder.parent / "000000")
    assert not torch.equal(base.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert transformers.AutoTokenizer.from_pretrained(folder).chat_template
    assert '"updates_left_out": 0.0' in (folder / "update.json").read_text()


async def test_a_kl_penalty_gives_groups_of_equal_scores_a_preference(tmp_path: Path, make_learner: MakeLearner) -> None:
    recipe = build_recipe(objective={"kl": "k1_reward", "kl_coef": 0.1}).model_copy(update={"steps": 1})
    write_run(tmp_path, recipe, [random_group(index, scores=[1.0] * 4) for index in range(3)])
    learner = make_learner(tmp_path, recipe)
    await learner.start()
    await learner.wait(timeout_s=600)
    update = json.loads((tmp_path / "versions" / "000001" / "update.json").read_text())
    assert update["weights_changed"] == 1.0
    assert update["kl_penalty_mean"] != 0.0
    assert update["groups_trained"] == 3


async def test_a_value_head_is_saved_but_not_published_and_resumes_at_another_zero_stage(tmp_path: Path, make_learner: MakeLearner) -> None:
    sections = {"objective": {"advantage": "gae"}, "critic": {"trunk": "shared"}}
    recipe = build_recipe(**sections).model_copy(update={"steps": 1})
    write_run(tmp_path, recipe, [random_group(index) for index in range(6)])
    learner = make_learner(tmp_path, recipe)
    await learner.start()
    await learner.wait(timeout_s=600)
    saved = torch.load(tmp_path / "checkpoints" / "000001" / "state" / "mp_rank_00_model_states.pt", weights_only=False)
    assert saved["module"]["value.weight"].any()

    resharded = build_recipe(**sections, learner={"zero_stage": 3})
    (tmp_path / "recipe.json").write_text(resharded.model_dump_json())
    learner = make_learner(tmp_path, resharded)
    await learner.start()
    await learner.wait(timeout_s=600)
    assert "resumed after step 1 from" in learner.log_tail()
    names = []
    for number in range(3):
        with safe_open(tmp_path / "versions" / f"{number:06d}" / "model.safetensors", "pt") as weights:
            names.append(set(weights.keys()))
    assert names[0] == names[1] == names[2], "only the policy's parameters are published"
    update = json.loads((tmp_path / "versions" / "000002" / "update.json").read_text())
    assert update["value_loss"] > 0 and update["value_mean"] != 0


async def test_adapters_are_published_without_their_base_which_is_checked_on_resume(tmp_path: Path, make_learner: MakeLearner) -> None:
    """One learner on two ranks that share sequences, shard the weights and offload them."""
    from peft import PeftModel

    parts = {"lora": {"rank": 2}, "ranks": 2, "sequence_parallel": 2, "zero_stage": 3}
    recipe = build_recipe(learner=parts, objective={"kl": "k3", "kl_coef": 0.1}).but({"device": "auto", "learner.offload": "parameters"})
    write_run(tmp_path, recipe, [random_group(index) for index in range(6)])
    learner = make_learner(tmp_path, recipe)
    await learner.start()
    await learner.wait(timeout_s=600)
    registry, base = FolderRegistry(tmp_path / "versions"), tmp_path / "versions" / "000000"
    second = registry.get(2)
    assert second is not None and second.weights == "adapter_model.safetensors"
    registry.verify(second)
    names = ["adapter_config.json", "adapter_model.safetensors", "probe.json", "update.json", "version.json"]
    assert sorted(path.name for path in registry.path(second).iterdir()) == names
    probe = codec.from_json(Probe, (registry.path(second) / "probe.json").read_bytes())
    model = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), registry.path(second))
    row = torch.tensor([probe.token_ids[0]])
    with torch.no_grad():
        expected = model(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
    assert (expected - torch.tensor(probe.logprobs[0])).abs().max() < 1e-5
    assert json.loads((registry.path(second) / "update.json").read_text())["kl_reference"] > 0.0

    write_policy(base, seed=1)
    learner = make_learner(tmp_path, recipe)
    await learner.start()
    with pytest.raises(LearnerError, match="differs from the registered file"):
        await learner.wait(timeout_s=600)


async def test_turn_credit_without_turn_rewards_raises_with_a_fix(tmp_path: Path, make_learner: MakeLearner) -> None:
    recipe = build_recipe(objective={"turn_coef": 0.5})
    write_run(tmp_path, recipe, [random_group(index) for index in range(3)])
    learner = make_learner(tmp_path, recipe)
    await learner.start()
    with pytest.raises(UserError, match="has no turn rewards") as error:
        await learner.wait(timeout_s=600)
    assert "objective.turn_coef=0" in error.value.fix and len(str(error.value).splitlines()) == 2


async def test_a_crash_after_the_checkpoint_is_repaired(tmp_path: Path, host: Path, make_learner: MakeLearner) -> None:
    """Killed before the commit of step 0, then before the publication of step 1, and resumed after the folder was moved: the result is that
    of an undisturbed run. Step 1 also trains the groups of step 0 again, except one that has no preference.
    """
    recipe = build_recipe().but("order=replay")
    groups = [random_group(index, scores=[1.0] * 4 if index == 1 else None) for index in range(6)]
    crashing, undisturbed = tmp_path / "crashing", tmp_path / "calm"
    for run_dir in (crashing, undisturbed):
        write_run(run_dir, recipe, groups)
    store, registry = SqliteStore(crashing / "experience.sqlite"), FolderRegistry(crashing / "versions")

    assert _run_until_killed(host, crashing, "commit") != 0
    assert (crashing / "checkpoints" / "000001" / "manifest.json").exists()
    assert (consumed(store), registry.get(1)) == ({}, None)

    assert _run_until_killed(host, crashing, "publish-2") != 0
    assert consumed(store) == {index: index // 3 for index in range(6)}
    assert registry.get(1) is not None
    assert registry.get(2) is None
    store.close()
    crashing = Path(shutil.move(crashing, tmp_path / "moved"))

    learners = [make_learner(run_dir, recipe) for run_dir in (crashing, undisturbed)]
    for learner in learners:
        await learner.start()
        await learner.wait(timeout_s=600)
    store = SqliteStore(crashing / "experience.sqlite")
    entries = store.entries()
    assert [(entry.index, entry.step, entry.state) for entry in entries] == [
        (index, index // 3, "excluded" if index == 1 else "trained") for index in range(6)
    ]
    trained = [float(sum(entry.use.tokens_trained for entry in entries if entry.use and entry.step == step)) for step in (0, 1)]
    names = ("groups", "groups_trained", "groups_replayed", "tokens_trained", "tokens_replayed")
    updates = [json.loads((crashing / "versions" / f"{number:06d}" / "update.json").read_text()) for number in (1, 2)]
    assert [[update[name] for name in names] for update in updates] == [[3, 2, 0, trained[0], 0], [3, 3, 2, trained[1], trained[0]]]
    assert all(update["tokens_captured"] == update["tokens_delivered"] for update in updates), "every captured token is delivered"
    assert updates[1]["staleness_max"] == 1 and count(entries).tokens["trained"] == sum(trained)
    store.close()
    for number in (1, 2):
        files = [run_dir / "versions" / f"{number:06d}" for run_dir in (crashing, undisturbed)]
        for name in ("model.safetensors", "probe.json", "config.json"):
            assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes(), (number, name)
    remaining = sorted(path.name for path in (crashing / "checkpoints").iterdir())
    assert remaining == ["000001", "000002", CONSUMED_FILE]
    assert [set(uses) for uses in read_steps(crashing / "checkpoints", 9)] == [{0, 1, 2}, {3, 4, 5}], "no step is recorded twice"


async def test_the_next_step_trains_residuals_once_even_after_a_crash(tmp_path: Path, host: Path, make_learner: MakeLearner) -> None:
    """Killed after the checkpoint of the step that trains them, which also replays their original groups. The result is that of an
    undisturbed run."""
    recipe = build_recipe(objective={"normalize_std": False}).but({"order": "replay", "max_staleness": 1})
    groups = [random_group(index) for index in range(6)]
    crashing, undisturbed = tmp_path / "crashing", tmp_path / "calm"
    for run_dir in (crashing, undisturbed):
        write_run(run_dir, recipe, [*map(_with_residual, groups[:3]), *groups[3:]])
        store = SqliteStore(run_dir / "experience.sqlite")
        for name in (scored.episode.id for group in groups[:3] for scored in group.episodes):
            value = float(name.endswith("0"))
            store.add_score(LateScore(episode_id=name, part="human", value=value, scored_by="a", key=name), now=1.0)
        store.close()
    assert _run_until_killed(host, crashing, "publish-2") != 0
    ends = []
    for run_dir in (crashing, undisturbed):
        learner = make_learner(run_dir, recipe)
        await learner.start()
        await learner.wait(timeout_s=600)
        store = SqliteStore(run_dir / "experience.sqlite")
        assert consumed(store) == {index: max(index // 3, 0) or int(index < 0) for index in range(-3, 6)}
        counts = count(store.entries())
        assert counts.residuals == 3 and counts.tokens_sampled == counts.tokens_trained and counts.tokens_residual
        update = json.loads((run_dir / "versions" / "000002" / "update.json").read_text())
        new, residual = (
            sum(entry.tokens_sampled for entry in store.entries(step=1) if entry.is_residual == late) for late in (False, True)
        )
        assert (update["groups_trained"], update["groups_replayed"]) == (3, 3) and counts.tokens_residual == residual
        assert (update["tokens_trained"], update["tokens_replayed"]) == (new, residual), "tokens of residuals are in neither"
        assert update["tokens_delivered"] == update["tokens_captured"] == new + 2 * residual
        assert list(verify(run_dir, store)) == []
        store.close()
        ends.append((run_dir / "versions" / "000002" / "model.safetensors").read_bytes())
    assert ends[0] == ends[1]


def _with_residual(group: Group) -> Group:
    """The group with its scores as partial scores, and one part pending."""
    part = PendingPart(name="human", residual=True)
    waiting = (replace(scored, score=Score(value=None, partial=scored.score.value or 0.0, pending=(part,))) for scored in group.episodes)
    return replace(group, episodes=tuple(waiting))


def _run_until_killed(host: Path, run_dir: Path, point: str) -> int:
    command = preloaded.command(host, 1, "tests.learner.crash", point, "--run-dir", str(run_dir))
    return subprocess.run(command, capture_output=True, timeout=600, check=False).returncode


async def test_a_failed_start_reports_its_cause(tmp_path: Path) -> None:
    recipe = build_recipe()
    write_run(tmp_path, recipe, [])
    (tmp_path / "checkpoints" / "000001").mkdir(parents=True)
    learner = LearnerProcess(tmp_path, recipe)
    await learner.start()
    with pytest.raises(LearnerError, match=r"every checkpoint in .* is damaged") as error:
        await learner.wait(timeout_s=600)
    assert str(learner.log_path) in str(error.value) and len(str(error.value).splitlines()) == 2, "torchrun's own report is omitted"
    with pytest.raises(LearnerError):
        learner.check()


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_killed_rank_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """A killed rank writes no error, so the launcher's report of it is used. No log of torchrun remains in the temporary folder."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    recipe = build_recipe(learner={"ranks": ranks})
    write_run(tmp_path, recipe, [])
    learner = LearnerProcess(tmp_path, recipe)
    await learner.start()
    try:
        await until(lambda: _workers(tmp_path), 600.0)
        await asyncio.sleep(1.0)
        os.kill(_workers(tmp_path)[0], signal.SIGKILL)
        with pytest.raises(LearnerError, match=r"rank \d was killed by signal 9, SIGKILL \(the kernel sends it if memory runs out\)"):
            await learner.wait(timeout_s=300)
    finally:
        await learner.kill()
    assert not list(temporary.glob("torchelastic_*"))


# An attack by a local user on the store through which the workers find each other: write a pickle to the key that torchrun's dynamic
# rendezvous reads every few seconds.
_INTRUDER = """
import base64, os, pickle, sys, datetime
from torch.distributed import TCPStore
class Program:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[2]}",)
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=datetime.timedelta(seconds=20))
for key in ("torch.rendezvous.none", "torch.rendezvous.", "none"):
    store.set(key, base64.b64encode(pickle.dumps(Program())))
print("left")
"""


async def test_the_store_of_two_workers_does_not_unpickle_injected_data(tmp_path: Path) -> None:
    recipe = build_recipe(learner={"ranks": 2})
    write_run(tmp_path, recipe, [])
    learner = LearnerProcess(tmp_path, recipe)
    await learner.start()
    try:
        await until(lambda: len(_workers(tmp_path)) == 2, 600.0)
        assert learner._process is not None
        family = [psutil.Process(learner._process.pid), *psutil.Process(learner._process.pid).children(recursive=True)]
        listening = [sock.laddr for process in family for sock in process.net_connections("inet") if sock.status == psutil.CONN_LISTEN]
        assert listening and {address.ip for address in listening} == {"127.0.0.1"}
        canary = tmp_path / "ran"
        ports = {sock.laddr.port for sock in family[0].net_connections("inet") if sock.status == psutil.CONN_LISTEN}
        for port in ports:
            result = subprocess.run([sys.executable, "-c", _INTRUDER, str(port), str(canary)], capture_output=True, text=True, timeout=120)
            assert result.stdout == "left\n", result.stderr
        await asyncio.sleep(12.0)  # torchrun's dynamic rendezvous reads its state every five seconds
        assert not canary.exists() and learner.alive
    finally:
        await learner.kill()


def _workers(run_dir: Path) -> list[int]:
    commands = ((process.pid, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [
        pid for pid, argv in commands if "agentrl.learner.main" in argv and str(run_dir) in argv and "agentrl.learner.launch" not in argv
    ]


@pytest.mark.usefixtures("own_mounts")
async def test_a_full_disk_is_reported(tmp_path: Path, make_learner: MakeLearner) -> None:
    """The first checkpoint does not fit. Torch's writer gives no reason, and the log cannot grow either. Mounting needs root."""
    recipe = build_recipe()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(tmp_path)], check=True)
    try:
        write_run(tmp_path, recipe, [random_group(index) for index in range(3)])
        with contextlib.suppress(OSError):
            (tmp_path / "filler").write_bytes(bytes(shutil.disk_usage(tmp_path).free - (200 << 10)))
        learner = make_learner(tmp_path, recipe)
        await learner.start()
        with pytest.raises(DiskFull, match=r"the learner: .*checkpoint"):
            await learner.wait(timeout_s=600)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_no_process_survives_a_killed_driver(tmp_path: Path) -> None:
    recipe = build_recipe()
    write_run(tmp_path, recipe, [])
    driver = (
        "import asyncio, sys; from pathlib import Path\n"
        "from agentrl.learner import LearnerProcess; from agentrl.config import load\n"
        "async def main():\n"
        "    run = Path(sys.argv[1]); learner = LearnerProcess(run, load(run / 'recipe.json'))\n"
        "    await learner.start(); await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", driver, str(tmp_path)])
    # the launcher and its worker
    wait_until(lambda: sum("agentrl.learner.main" in line and str(tmp_path) in line for line in _command_lines()) >= 2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(str(tmp_path) in line for line in _command_lines()))  # orphans would run forever
