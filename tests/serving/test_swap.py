from __future__ import annotations

import asyncio
import hashlib
import math
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.errors import ServingError, SwapError
from agentrl.records import PolicyVersion, Probe
from agentrl.records.sampling import Sampling
from agentrl.serving import FileWeightChannel, VLLMServer
from agentrl.serving.control import ControlPlane
from agentrl.serving.probe import judge_logprob_difference, max_logprob_difference, next_token_differences, parse_prompt_logprobs
from agentrl.serving.swap import HotSwap
from agentrl.version import deltas
from tests.serving.scripted_server import HANG, Call, ScriptedServer, generated, scripted_server
from tests.waiting import until

PROBE = Probe(token_ids=((1, 2, 3),), logprobs=((-1.0, -2.0),))
EXCHANGE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
AFTER_A_BROKEN_LOAD = ["/pause", "/finish_weight_update", *EXCHANGE[1:]]


def publish(run_dir: Path, number: int) -> PolicyVersion:
    folder = run_dir / "versions" / str(number)
    folder.mkdir(parents=True)
    data = b"weights %d" % number
    (folder / "model.safetensors").write_bytes(data)
    return PolicyVersion(number=number, parent=None, folder=f"versions/{number}", sha256=hashlib.sha256(data).hexdigest())


class Engine:
    """Answers as a vLLM server does, including the version of its weights. `faults` overrides the answer to a path once."""

    def __init__(self, **faults: Any) -> None:
        self.version = "0"
        self.faults = faults
        self.logprobs = (-1.0, -2.0)

    def __call__(self, call: Call) -> Any:
        name = call.path.rpartition("/")[2]
        if name in self.faults:
            return self.faults.pop(name)
        if name == "finish_weight_update" and call.body["weight_version"] is not None:
            self.version = call.body["weight_version"]
        if name == "generate":
            ids = call.body["token_ids"]
            entries = [{str(token): {"logprob": value, "rank": 1}} for token, value in zip(ids[1:], self.logprobs, strict=True)]
            return generated([7], version=self.version) | {"prompt_logprobs": [None, *entries]}
        return {}


@asynccontextmanager
async def channel(
    run_dir: Path, engine: Callable[[Call], Any], *, kind: type[HotSwap] = FileWeightChannel
) -> AsyncIterator[tuple[HotSwap, VLLMServer, ScriptedServer]]:
    recipe = Recipe(name="t", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="a:b"))
    publish(run_dir, 0)
    server = VLLMServer(recipe=recipe, model=run_dir / "versions/0", version=0, run_dir=run_dir)
    async with scripted_server(engine) as script:
        server._control = ControlPlane(script.url)
        yield kind(server, registry_folder=run_dir / "versions"), server, script
        await server.stop()


async def swap(weight_channel: HotSwap, run_dir: Path, version: PolicyVersion, *, timeout_s: float = 60.0) -> float:
    report = await weight_channel.swap(version, run_dir / version.folder, PROBE, max_abs_diff=1e-3, timeout_s=timeout_s)
    assert report.version == version.number
    assert 0 < report.stall_ms < report.total_ms
    return report.probe_max_abs_diff


async def test_a_swap_pauses_loads_resumes_and_probes(tmp_path: Path) -> None:
    engine = Engine()
    engine.logprobs = (-1.0, -2.0004)
    version = publish(tmp_path, 5)
    async with channel(tmp_path, engine) as (weight_channel, server, script):
        assert await swap(weight_channel, tmp_path, version) == pytest.approx(4e-4)
        assert script.paths() == [*EXCHANGE, "/inference/v1/generate"]
        assert script.calls[0].query == "mode=keep"
        assert script.calls[2].body["update_info"]["files"] == {"model.safetensors": 9}
        assert (server.weights.number, server.weights.on_probation, engine.version) == (5, None, "5")


async def test_disagreement_restores_the_old_version_and_voids_new_samples(tmp_path: Path) -> None:
    engine = Engine()
    engine.logprobs = (-1.0, -2.5)
    version = publish(tmp_path, 5)
    async with channel(tmp_path, engine) as (weight_channel, server, script):
        with pytest.raises(SwapError, match=r"differ by 0\.5 nats"):
            await swap(weight_channel, tmp_path, version)
        assert script.paths()[6:] == EXCHANGE
        assert script.calls[6].query == "mode=abort"
        assert script.calls[8].body["update_info"]["folder"] == str(tmp_path / "versions/0")
        assert (server.weights.number, engine.version) == (0, "0")
        engine.logprobs = (-1.0, -2.0)
        await swap(weight_channel, tmp_path, version)  # the same version may try again


@pytest.mark.parametrize("logprobs", [(float("nan"), -2.0), (-1.0, float("-inf"))])
async def test_nan_logprobs_are_disagreement(tmp_path: Path, logprobs: tuple[float, float]) -> None:
    engine = Engine()
    engine.logprobs = logprobs
    version = publish(tmp_path, 5)
    async with channel(tmp_path, engine) as (weight_channel, _, _):
        with pytest.raises(SwapError, match="inf nats"):
            await swap(weight_channel, tmp_path, version)


def top_logprobs_answer(*tables: dict[int, float]) -> dict[str, Any]:
    """An answer with one token per table; the token is the first of its table of most likely tokens."""
    content = [
        {"token_id": next(iter(table)), "logprob": 0.0, "top_logprobs": [{"token_id": t, "logprob": v} for t, v in table.items()]}
        for table in tables
    ]
    return generated([7] * len(tables), logprobs={"content": content})


LEARNER = {4: math.log(0.5), 5: math.log(0.25), 6: math.log(0.15), 7: math.log(0.05)}  # half of it lies beyond top_k=2
TOP_2 = Sampling(temperature=0.5, top_k=2, supports=True)


@pytest.mark.parametrize(
    ("logprobs", "sampling", "largest"),
    [
        ({4: math.log(2 / 3), 5: math.log(1 / 3), 6: -9999.0}, TOP_2, 0.0),  # the learner's, over the support that was answered
        ({4: math.log(0.6), 5: math.log(0.4), 6: -9999.0}, TOP_2, math.log(0.4 * 3)),
        ({4: math.log(0.5 / 0.55), 90: math.log(0.05 / 0.55), 6: -9999.0}, TOP_2, 0.0),  # may be as likely as the last one listed
        ({4: math.log(0.7), 90: math.log(0.3), 6: -9999.0}, TOP_2, math.log(0.3 / (0.05 / 0.55))),  # may not be that likely
        ({4: math.log(0.5), 5: math.log(0.2), 90: math.log(0.01)}, Sampling(), math.log(0.25 / 0.2)),
        ({4: -9999.0, 5: 0.0}, Sampling(), 9999.0 + math.log(0.5)),
    ],
)
def test_next_tokens_are_compared_over_the_servers_support(logprobs: dict[int, float], sampling: Sampling, largest: float) -> None:
    assert max(next_token_differences(top_logprobs_answer(logprobs), LEARNER, sampling, 5)) == pytest.approx(largest, abs=1e-9)


def test_very_unlikely_tokens_are_compared() -> None:
    assert next_token_differences(top_logprobs_answer({4: 0.0, 5: -2000.0, 6: -9999.0}), {4: 0.0, 5: -2000.0}, TOP_2, 5) == [0.0, 0.0]


@pytest.mark.parametrize("tables", [None, [], [{4: 0.0, 5: -9999.0}, {4: 0.0}], [{4: 0.0}], [{4: -1.0, 5: -9999.0}]])
def test_an_invalid_support_rejects_the_version(tables: Any) -> None:
    with pytest.raises(SwapError, match="version 5: malformed response to the logprob probe"):
        next_token_differences({} if tables is None else top_logprobs_answer(*tables), LEARNER, TOP_2, 5)


async def test_the_probe_uses_the_rollouts_sampling_settings(tmp_path: Path) -> None:
    """The rows agree but the next tokens do not, as with a server that samples at another temperature."""
    probe = Probe(token_ids=((1, 2, 3),), logprobs=((-1.0, -2.0),), next_ids=(tuple(LEARNER),), next_logprobs=(tuple(LEARNER.values()),))
    version, tables = publish(tmp_path, 5), [{4: math.log(2 / 3), 5: math.log(1 / 3), 6: -9999.0}]

    class Sampled(Engine):
        def __call__(self, call: Call) -> Any:
            answer = super().__call__(call)
            if call.path.endswith("/generate"):
                answer["choices"][0]["logprobs"] = top_logprobs_answer(tables[-1])["choices"][0]["logprobs"]
            return answer

    engine = Sampled()
    async with channel(tmp_path, engine) as (weight_channel, server, script):
        server.recipe = server.recipe.but("rollout.sampling.top_k=2", "rollout.sampling.temperature=0.5")
        report = await weight_channel.swap(version, tmp_path / version.folder, probe, max_abs_diff=1e-3, timeout_s=60)
        assert report.probe_max_abs_diff < 1e-9
        params = script.calls[-1].body["sampling_params"]
        assert (params["temperature"], params["top_k"], params["max_tokens"], params["prompt_logprobs"]) == (0.5, 2, 1, 0)
        assert params["detokenize"] is False
        tables.append({4: math.log(0.8), 5: math.log(0.2), 6: -9999.0})  # at a temperature of 1/4
        with pytest.raises(SwapError, match=r"differ by 0\.511 nats"):
            await weight_channel.swap(version, tmp_path / version.folder, probe, max_abs_diff=1e-3, timeout_s=60)


@pytest.mark.parametrize("step", ["start_weight_update", "update_weights", "finish_weight_update"])
async def test_a_failed_load_resumes_with_the_old_version_and_aborts_nothing(tmp_path: Path, step: str) -> None:
    engine = Engine(**{step: (500, {"error": "shapes differ"})})
    version = publish(tmp_path, 5)
    async with channel(tmp_path, engine) as (weight_channel, server, script):
        with pytest.raises(SwapError, match="shapes differ"):
            await swap(weight_channel, tmp_path, version)
        assert script.paths()[-6:] == AFTER_A_BROKEN_LOAD
        assert all(call.query != "mode=abort" for call in script.calls)
        assert (server.weights.number, engine.version) == (0, "0")


@pytest.mark.parametrize("lost", ["", deltas.DELTA_FILE])
async def test_a_version_that_is_deleted_during_the_pause_leaves_the_old_version(tmp_path: Path, lost: str) -> None:
    version, engine = delta(tmp_path, 5, 4), Engine()

    def deletes(call: Call) -> Any:
        if call.path == "/pause":
            gone = tmp_path / version.folder / lost
            shutil.rmtree(gone, ignore_errors=True) if gone.is_dir() else gone.unlink(missing_ok=True)
        return engine(call)

    async with channel(tmp_path, deletes) as (weight_channel, server, script):
        with pytest.raises(SwapError, match=r"version 5 was not swapped in: .*No such file"):
            await swap(weight_channel, tmp_path, version)
        assert server.weights.number == 0 and script.paths()[-1] == "/resume"


async def test_a_failed_pause_ends_no_weight_update(tmp_path: Path) -> None:
    version = publish(tmp_path, 5)
    async with channel(tmp_path, Engine(pause=(500, {"error": "busy"}))) as (weight_channel, _, script):
        with pytest.raises(SwapError, match="busy"):
            await swap(weight_channel, tmp_path, version)
        assert script.paths() == ["/pause", *EXCHANGE]


@pytest.mark.slow
async def test_a_load_past_its_deadline_is_undone(tmp_path: Path) -> None:
    version = publish(tmp_path, 5)
    async with channel(tmp_path, Engine(update_weights=HANG)) as (weight_channel, server, script):
        with pytest.raises(SwapError, match=r"did not finish within 2 s"):
            await swap(weight_channel, tmp_path, version, timeout_s=2.0)
        assert script.paths()[-1] == "/resume"
        assert server.weights.number == 0


async def test_cancellation_leaves_the_server_running(tmp_path: Path) -> None:
    version = publish(tmp_path, 5)
    async with channel(tmp_path, Engine(update_weights=HANG)) as (weight_channel, _, script):
        task = asyncio.create_task(swap(weight_channel, tmp_path, version))
        while "/update_weights" not in script.paths():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert script.paths()[-1] == "/resume"


async def test_a_server_is_unsound_after_a_cancellation_while_it_is_restored(tmp_path: Path) -> None:
    version = publish(tmp_path, 5)
    async with channel(tmp_path, Engine(update_weights=HANG, finish_weight_update=HANG)) as (weight_channel, server, script):
        task = asyncio.create_task(swap(weight_channel, tmp_path, version))
        for path in ("/update_weights", "/finish_weight_update"):
            await until(lambda path=path: path in script.paths(), 60.0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert script.paths()[-1] == "/finish_weight_update"
        assert not await server.alive() and "cancelled twice" in server.end_reason


async def test_a_server_that_answers_with_another_version_is_refused(tmp_path: Path) -> None:
    answer = generated([7], version="4") | {"prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": -2.0}}]}
    version = publish(tmp_path, 5)
    async with channel(tmp_path, Engine(generate=answer)) as (weight_channel, _, _):
        with pytest.raises(SwapError, match=r"answered the probe of version 5 with versions \['4'\]"):
            await swap(weight_channel, tmp_path, version)


async def test_a_server_that_cannot_restore_is_marked_unsound(tmp_path: Path) -> None:
    def broken(call: Call) -> Any:
        return (500, {"error": "gone"}) if call.path == "/update_weights" else {}

    version = publish(tmp_path, 5)
    async with channel(tmp_path, broken) as (weight_channel, server, _):
        with pytest.raises(SwapError, match="must be restarted"):
            await swap(weight_channel, tmp_path, version)
        assert not await server.alive() and server.end_reason.startswith("version 0 could not be restored: ")


async def test_an_unpublished_file_never_reaches_the_server(tmp_path: Path) -> None:
    version = publish(tmp_path, 5)
    (tmp_path / "versions/5/model.safetensors").write_bytes(b"weights X")
    async with channel(tmp_path, Engine()) as (weight_channel, _, script):
        with pytest.raises(SwapError, match="sha256"):
            await swap(weight_channel, tmp_path, version)
        assert script.calls == []


async def test_a_folder_outside_the_versions_folder_never_reaches_the_server(tmp_path: Path) -> None:
    version = publish(tmp_path / "elsewhere", 5)
    async with channel(tmp_path, Engine()) as (weight_channel, _, script):
        with pytest.raises(SwapError, match="not inside"):
            await weight_channel.swap(version, tmp_path / "elsewhere/versions/5", PROBE, max_abs_diff=1e-3, timeout_s=60)
        assert script.calls == []


async def test_a_difference_of_exactly_the_limit_passes(tmp_path: Path) -> None:
    engine, version = Engine(), publish(tmp_path, 5)
    engine.logprobs = (-1.0, -2.25)
    async with channel(tmp_path, engine) as (weight_channel, _, _):
        report = await weight_channel.swap(version, tmp_path / version.folder, PROBE, max_abs_diff=0.25, timeout_s=60)
        assert report.probe_max_abs_diff == 0.25


async def test_the_report_is_in_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of the clock is 0.25 s after the previous one: two reads for the stall within two for the total."""
    now = iter(number / 4 for number in range(400, 500))
    monkeypatch.setattr("agentrl.serving.swap.time", SimpleNamespace(perf_counter=lambda: next(now)))
    version = publish(tmp_path, 5)
    async with channel(tmp_path, Engine()) as (weight_channel, _, _):
        report = await weight_channel.swap(version, tmp_path / version.folder, PROBE, max_abs_diff=1e-3, timeout_s=60)
        assert (report.stall_ms, report.total_ms) == (250.0, 750.0)


@pytest.mark.parametrize("broken", ["nothing else", "mode=abort"])
async def test_samples_of_rejected_weights_are_void_even_if_the_restore_fails(tmp_path: Path, broken: str) -> None:
    """Requests that wait for the verdict on version 5 fail; the error gives the reason."""
    engine, version = Engine(), publish(tmp_path, 5)
    engine.logprobs = (-1.0, -9.0)

    def failing_engine(call: Call) -> Any:
        restores = call.path == "/update_weights" and call.body["update_info"]["folder"].endswith("/0")
        return (500, {"error": "gone"}) if restores or call.query == broken else engine(call)

    async with channel(tmp_path, failing_engine) as (weight_channel, server, _):
        with pytest.raises(SwapError, match=r"must be restarted: .*gone"):
            await swap(weight_channel, tmp_path, version)
        assert server.weights.on_probation is None
        with pytest.raises(ServingError, match=r"rejected after the swap .version 5."):
            await asyncio.wait_for(server.weights.wait_verified([5]), timeout=5)
        await server.weights.wait_verified([0])
        assert not await server.alive() and "gone" in server.end_reason


async def test_samples_of_rejected_weights_are_void_and_their_prefixes_unused(tmp_path: Path) -> None:
    engine, version = Engine(), publish(tmp_path, 5)
    engine.logprobs = (-1.0, -9.0)
    async with channel(tmp_path, engine) as (weight_channel, server, _):
        before = server.weights.cache_salt
        with pytest.raises(SwapError, match="differ by 7 nats"):
            await swap(weight_channel, tmp_path, version)
        with pytest.raises(ServingError, match=r"rejected after the swap .version 5."):
            await asyncio.wait_for(server.weights.wait_verified([5, 0]), timeout=5)
        assert server.weights.cache_salt.startswith("v0-") and server.weights.cache_salt != before


def delta(run_dir: Path, number: int, parent: int) -> PolicyVersion:
    """A version that is a delta of its parent, which has a complete file."""
    folder, base = run_dir / "versions" / str(number), run_dir / "versions" / f"{parent:06d}"
    folder.mkdir(parents=True)
    base.mkdir(exist_ok=True)
    save_file({"a": np.arange(64, dtype=np.float32)}, base / deltas.WEIGHTS)
    changed_file = run_dir / "whole.safetensors"
    save_file({"a": np.arange(64, dtype=np.float32) + (np.arange(64) == 7)}, changed_file)
    written_delta = deltas.write_delta(base / deltas.WEIGHTS, changed_file, folder, number=parent)
    assert written_delta is not None
    return PolicyVersion(number=number, parent=parent, folder=f"versions/{number}", sha256=written_delta.sha256)


async def test_a_delta_is_loaded_unless_there_is_a_whole_file(tmp_path: Path) -> None:
    version = delta(tmp_path, 5, 4)
    folder = tmp_path / version.folder
    frames = (folder / deltas.DELTA_FILE).stat().st_size
    async with channel(tmp_path, Engine()) as (weight_channel, server, script):
        await swap(weight_channel, tmp_path, version)
        assert script.paths() == [*EXCHANGE, "/inference/v1/generate"]
        assert script.calls[2].body["update_info"] == {"folder": str(folder.resolve()), "files": {deltas.DELTA_FILE: frames}}
        assert not (folder / deltas.WEIGHTS).exists()
        deltas.materialize(folder)
        await swap(weight_channel, tmp_path, version)
        assert script.calls[8].body["update_info"]["files"] == {deltas.WEIGHTS: (folder / deltas.WEIGHTS).stat().st_size}
        assert server.weights.number == 5


async def test_a_rejected_delta_is_loaded_whole(tmp_path: Path) -> None:
    version = delta(tmp_path, 5, 4)
    async with channel(tmp_path, Engine(update_weights=(500, {"error": "it does not fit"}))) as (weight_channel, server, script):
        await swap(weight_channel, tmp_path, version)
        assert [*script.calls[5].body["update_info"]["files"]] == [deltas.WEIGHTS]
        assert server.weights.number == 5


async def test_a_broken_delta_leaves_the_old_version(tmp_path: Path) -> None:
    version = delta(tmp_path, 5, 4)
    shutil.rmtree(tmp_path / "versions" / "000004")
    async with channel(tmp_path, Engine(update_weights=(500, {"error": "it does not fit"}))) as (weight_channel, server, _):
        with pytest.raises(SwapError, match="version 5: "):
            await swap(weight_channel, tmp_path, version)
        assert server.weights.number == 0 and not await server.alive()
        assert server.end_reason == "it died", "the test server has no process; it was not marked unsound"


async def test_a_whole_file_next_to_a_delta_is_checked(tmp_path: Path) -> None:
    version = delta(tmp_path, 5, 4)
    folder = tmp_path / version.folder
    deltas.materialize(folder)
    (folder / deltas.DELTA_FILE).unlink()
    async with channel(tmp_path, Engine()) as (weight_channel, server, script):
        await swap(weight_channel, tmp_path, version)
        calls = len(script.calls)
        (folder / deltas.WEIGHTS).write_bytes(b"X" + (folder / deltas.WEIGHTS).read_bytes()[1:])
        with pytest.raises(SwapError, match=r"model.safetensors is not the published file"):
            await swap(weight_channel, tmp_path, version)
        assert len(script.calls) == calls and server.weights.number == 5


@pytest.mark.parametrize("damage", ["frames", "record", "missing", "another"])
async def test_an_unpublished_delta_never_reaches_the_server(tmp_path: Path, damage: str) -> None:
    version = delta(tmp_path, 5, 4)
    folder = tmp_path / version.folder
    if damage == "frames":
        (folder / deltas.DELTA_FILE).write_bytes(b"X" + (folder / deltas.DELTA_FILE).read_bytes()[1:])
    elif damage == "record":
        (folder / deltas.DELTA_RECORD).write_text("{")
    elif damage == "missing":
        (folder / deltas.DELTA_FILE).unlink()
    else:
        version = PolicyVersion(number=5, parent=4, folder=version.folder, sha256="0" * 64)
    async with channel(tmp_path, Engine()) as (weight_channel, _, script):
        with pytest.raises(SwapError, match=r"version 5: .*(sha256 differs|cannot read its weights)"):
            await swap(weight_channel, tmp_path, version)
        assert script.calls == []


@pytest.mark.parametrize("exists", [True, False])
async def test_an_adapter_is_checked_against_its_own_file(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "versions" / "5"
    folder.mkdir(parents=True)
    data = b"adapter"
    if exists:
        (folder / "adapter_model.safetensors").write_bytes(data)
    version = PolicyVersion(
        number=5, parent=0, folder="versions/5", sha256=hashlib.sha256(data).hexdigest(), weights="adapter_model.safetensors"
    )
    async with channel(tmp_path, Engine()) as (weight_channel, server, script):
        if exists:
            await swap(weight_channel, tmp_path, version)
            assert server.weights.number == 5
        else:
            with pytest.raises(SwapError, match="cannot read its weights"):
                await swap(weight_channel, tmp_path, version)
            assert script.calls == []


async def test_an_empty_probe_has_no_difference(tmp_path: Path) -> None:
    async with channel(tmp_path, Engine()) as (_, server, _):
        assert await max_logprob_difference(server, 0, Probe(token_ids=(), logprobs=())) == 0.0
        assert await max_logprob_difference(server, 0, PROBE) == 0.0


async def test_rows_are_cut_to_a_context_that_is_shorter_than_in_training(tmp_path: Path) -> None:
    """The token after a row is not compared if the row's end is cut."""
    next_token = {"next_ids": (tuple(LEARNER),), "next_logprobs": (tuple(LEARNER.values()),)}
    row = tuple(range(1, 19))
    probe = Probe(token_ids=(row,), logprobs=((-1.0,) * 13 + (-1.25, -9.0, -9.0, -9.0),), **next_token)
    engine = Engine()
    engine.logprobs = (-1.0,) * 14
    async with channel(tmp_path, engine) as (_, server, script):
        server.recipe = server.recipe.but("policy.max_model_len=16")
        assert await max_logprob_difference(server, 0, probe) == 0.25
        assert [call.body["token_ids"] for call in script.calls if call.path.endswith("/generate")] == [list(row[:15])]


@pytest.mark.parametrize("answer", [{}, [], {"choices": []}, {"choices": [{"weight_versions": [{}]}], "prompt_logprobs": [None]}])
def test_an_answer_without_logprobs_rejects_the_version(answer: Any) -> None:
    with pytest.raises(SwapError, match="version 5: malformed response to the logprob probe"):
        parse_prompt_logprobs(answer, (1, 2), 5)


async def test_a_judge_is_probed_within_its_context() -> None:
    def answer(call: Call) -> Any:
        ids = call.body["prompt"]
        return {"choices": [{"prompt_logprobs": [None, *({str(token): {"logprob": -1.0}} for token in ids[1:])]}]}

    probe = Probe(token_ids=((1, 2, 3, 4, 5, 6), (7, 8)), logprobs=((-1.0, -1.25, -9.0, -9.0, -9.0), (-1.0,)))
    async with scripted_server(answer) as script:
        control = ControlPlane(script.url)
        assert await judge_logprob_difference(control, "judge", probe, max_model_len=4, timeout_s=5) == 0.25
        empty = Probe(token_ids=(), logprobs=())
        assert await judge_logprob_difference(control, "judge", empty, max_model_len=4, timeout_s=5) == 0.0
        await control.close()
        options = {"model": "judge", "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        assert [call.body for call in script.calls] == [{**options, "prompt": [1, 2, 3]}, {**options, "prompt": [7, 8]}]
