"""The serving package on a real vLLM server. Order matters: the tests at the end kill the shared server."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import ipaddress
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.config import LoraConfig
from agentrl.errors import ServingError, SwapError
from agentrl.protocols import Policy
from agentrl.records import ADAPTER, Completion, Episode, Limits, PolicyVersion, Probe, Sample, SamplingParams, Score, Task
from agentrl.records.sampling import Sampling, Supports
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.serving.probe import max_logprob_difference
from agentrl.testing import byte_tokenizer
from agentrl.testing.tiny_model import VOCABULARY, make_model, make_probe, token_logprobs, write_version
from agentrl.version import deltas
from tests.episodes import restarting, task
from tests.serving.conftest import RECIPE, Served

__all__ = ["task"]

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

PROMPT = list(b"How many rows are there?")


def group_members(pgid: int) -> list[int]:
    process = subprocess.run(["pgrep", "-g", str(pgid)], capture_output=True, text=True, timeout=10)
    return [int(pid) for pid in process.stdout.split()]


def shared_memory(pgid: int) -> set[Path]:
    """Shared-memory files that the group's processes have mapped."""
    maps = (Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in group_members(pgid))
    return {Path(line[line.index("/dev/shm/") :]) for lines in maps for line in lines if "/dev/shm/" in line}


def completion_logprobs(served: Served, version: int, prompt: list[int], completion: Completion, temperature: float) -> list[float]:
    ids = (*prompt, *completion.token_ids)
    return token_logprobs(served.models[version], ids, temperature=temperature)[len(prompt) - 1 :]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_come_from_the_sampling_distribution(served: Served, temperature: float) -> None:
    version = served.server.weights.number
    completions = await asyncio.gather(*(served.generate([*PROMPT, i], max_tokens=40, temperature=temperature) for i in range(8)))
    for i, completion in enumerate(completions):
        reference = completion_logprobs(served, version, [*PROMPT, i], completion, temperature)
        assert completion.logprobs == pytest.approx(reference, abs=1e-3)
        assert [span.version for span in completion.versions] == [version]


async def test_greedy_follows_the_most_likely_token(served: Served) -> None:
    import torch

    version = served.server.weights.number
    completion = await served.generate(PROMPT, max_tokens=24, temperature=0.0)
    ids = torch.tensor([[*PROMPT, *completion.token_ids]])
    with torch.no_grad():
        best = served.models[version](ids).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert completion.token_ids == tuple(best.tolist())
    assert completion.logprobs == pytest.approx(completion_logprobs(served, version, PROMPT, completion, 1.0), abs=1e-3)


async def test_stop_token_ends_the_completion_and_belongs_to_it(served: Served) -> None:
    free = await served.generate(PROMPT, max_tokens=24, temperature=0.0)
    stop = free.token_ids[5]
    stopped = await served.generate(PROMPT, max_tokens=24, temperature=0.0, stop_token_ids=(stop,))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    assert free.finish_reason == "length"


async def test_a_prompt_longer_than_the_model_allows_is_an_error(served: Served) -> None:
    with pytest.raises(ServingError, match="400"):
        await served.generate([1] * 1100, max_tokens=1)


async def test_requests_continue_across_swaps_under_load(served: Served) -> None:
    await served.swap(0)
    order = (1, 2, 0, 1)
    requests = [asyncio.create_task(served.generate([*PROMPT, i], max_tokens=500)) for i in range(32)]
    await served.generate(PROMPT, max_tokens=20)  # by now the others are being decoded
    reports = []
    for number in order:
        reports.append(await served.swap(number))
        await served.generate(PROMPT, max_tokens=10)
    assert max(report.probe_max_abs_diff for report in reports) < 1e-3
    completions = await asyncio.gather(*requests)
    crossed = [[span.version for span in completion.versions] for completion in completions if len(completion.versions) > 1]
    assert crossed, "no request spans a swap: did the swap wait for the requests in flight?"
    served_in_turn = [0, *order]  # on a busy machine a request may start after the first swap
    for versions in crossed:
        assert versions in [served_in_turn[start : start + len(versions)] for start in range(len(order))]


async def test_cached_prefixes_do_not_survive_a_swap(served: Served) -> None:
    prompt = list(b"abcdefgh" * 50)  # several blocks of the prefix cache
    for number in (1, 2):
        await served.swap(number)
        for _ in range(2):  # the second request has a cached prefix
            completion = await served.generate(prompt, max_tokens=8)
            reference = completion_logprobs(served, number, prompt, completion, 1.0)
            assert completion.logprobs == pytest.approx(reference, abs=1e-3)


async def test_a_version_that_disagrees_is_rejected_and_the_old_one_serves(served: Served) -> None:
    await served.swap(1)
    with pytest.raises(SwapError, match="nats on the probe"):
        await served.swap(2, probe=0)
    completion = await served.generate(PROMPT, max_tokens=16)
    assert [span.version for span in completion.versions] == [1]
    assert completion.logprobs == pytest.approx(completion_logprobs(served, 1, PROMPT, completion, 1.0), abs=1e-3)
    assert await served.server.alive()


async def test_the_probe_detects_a_stale_output_head(served: Served) -> None:
    """vLLM's own reload leaves the packed copy of a tied head unchanged: every route answers 200; only the probe detects it."""
    await served.swap(1)
    control = served.server.control
    await control.pause()
    await control.reload(str(served.server.run_dir / served.versions[2].folder), 2)
    await control.resume()
    assert await control.version() == "2"
    assert await max_logprob_difference(served.server, 2, served.probes[2]) > 0.1
    await served.swap(2)
    assert await max_logprob_difference(served.server, 2, served.probes[2]) < 1e-3


async def test_another_shape_is_rejected_before_loading(served: Served, tmp_path: Path) -> None:
    await served.swap(1)
    other = make_model(seed=5)
    other.model.layers = other.model.layers[:3]
    version = write_version(served.server.run_dir, 9, other)
    with pytest.raises(SwapError, match=r"tensor model\.layers\.3"):
        await served.channel.swap(version, served.server.run_dir / version.folder, served.probes[1], max_abs_diff=1e-3, timeout_s=300)
    assert await max_logprob_difference(served.server, 1, served.probes[1]) < 1e-3


async def test_non_finite_weights_are_rejected(served: Served) -> None:
    import torch

    await served.swap(1)
    poisoned = make_model(seed=6)
    with torch.no_grad():
        poisoned.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    version = write_version(served.server.run_dir, 10, poisoned)
    with pytest.raises(SwapError):
        await served.channel.swap(version, served.server.run_dir / version.folder, served.probes[1], max_abs_diff=1e-3, timeout_s=300)
    assert await max_logprob_difference(served.server, 1, served.probes[1]) < 1e-3


async def test_the_server_rejects_weights_from_outside_the_run(served: Served, tmp_path: Path) -> None:
    version = write_version(tmp_path, 1, served.models[1])
    control = served.server.control
    await control.start_weight_update()
    file = tmp_path / version.folder / "model.safetensors"
    with pytest.raises(ServingError, match="not below"):
        await control.update_weights({"folder": str(file.parent), "files": {file.name: file.stat().st_size}})
    with pytest.raises(ServingError, match="already set"):
        await control.init_weight_transfer({"versions_folder": str(tmp_path)})


async def test_a_recorded_hash_that_differs_from_the_file_is_rejected(served: Served) -> None:
    wrong = dataclasses.replace(served.versions[2], sha256=hashlib.sha256(b"").hexdigest())
    before = served.server.weights.number
    with pytest.raises(SwapError, match="sha256"):
        folder = served.server.run_dir / wrong.folder
        await served.channel.swap(wrong, folder, served.probes[2], max_abs_diff=1e-3, timeout_s=300)
    assert served.server.weights.number == before


async def test_everything_listens_on_loopback(served: Served) -> None:
    connections = [socket for pid in group_members(served.server.pid or 0) for socket in psutil.Process(pid).net_connections("inet")]
    addresses = [socket.laddr.ip for socket in connections if socket.status == psutil.CONN_LISTEN]
    assert addresses and all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses


def write_adapter(served: Served, number: int, *, rank: int = 4) -> tuple[PolicyVersion, Probe]:
    """A random adapter to model 0, published the way the learner does it; its probe comes from peft's forward pass."""
    import torch

    from agentrl.learner import lora

    model, config = make_model(seed=0), LoraConfig(rank=rank, alpha=2.0 * rank)
    lora.attach(model, config, seed=number)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.normal_(std=0.1 if ".lora_B." in name else 0.5, generator=torch.Generator().manual_seed(number))
    folder = served.server.run_dir / "versions" / str(number)
    folder.mkdir()
    lora.save(folder, {name: parameter.detach() for name, parameter in trained.items()}, config, base="tiny")
    digest = hashlib.sha256((folder / ADAPTER).read_bytes()).hexdigest()
    served.models[number] = model
    return PolicyVersion(number=number, parent=0, folder=f"versions/{number}", sha256=digest, weights=ADAPTER), make_probe(model)


async def test_adapters_are_merged_and_replaced(served: Served) -> None:
    for number in (20, 21):
        served.versions[number], served.probes[number] = write_adapter(served, number)
    # Any request may end early by chance. The loop below never blocks this process, so the client sees each end between two swaps.
    requests = [asyncio.create_task(served.generate([*PROMPT, i], max_tokens=900)) for i in range(16)]
    await served.generate(PROMPT, max_tokens=4)  # by now the others are being decoded
    completions = {}
    order = (1, 20, 21, 2, 20)  # also between complete models
    for number in order:
        report = await served.swap(number)
        assert report.probe_max_abs_diff < 1e-3
        completion = completions[number] = await served.generate(PROMPT, max_tokens=16)
        assert [span.version for span in completion.versions] == [number]
    for number, completion in completions.items():
        assert completion.logprobs == pytest.approx(completion_logprobs(served, number, PROMPT, completion, 1.0), abs=1e-3)
    assert max(len(completion.versions) for completion in await asyncio.gather(*requests)) > 1, "a request continued across versions"
    assert max(abs(a - b) for a, b in zip(served.probes[20].logprobs[0], served.probes[0].logprobs[0], strict=True)) > 0.1
    files = [path.name for path in (served.server.run_dir / served.versions[20].folder).iterdir()]
    assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors"]


async def test_a_rejected_adapter_leaves_the_previous_one(served: Served) -> None:
    served.versions[22], served.probes[22] = write_adapter(served, 22)
    await served.swap(22)
    served.versions[23], _ = write_adapter(served, 23)
    with pytest.raises(SwapError, match="nats on the probe"):
        await served.swap(23, probe=22)
    assert await max_logprob_difference(served.server, 22, served.probes[22]) < 1e-3
    other = served.server.run_dir / served.versions[23].folder / ADAPTER
    other.write_bytes(other.read_bytes().replace(b"down_proj", b"none_proj"))
    served.versions[23] = dataclasses.replace(served.versions[23], sha256=hashlib.sha256(other.read_bytes()).hexdigest())
    with pytest.raises(SwapError, match="do not fit the model's weight None"):
        await served.swap(23, probe=22)
    assert await max_logprob_difference(served.server, 22, served.probes[22]) < 1e-3
    completion = await served.generate(PROMPT, max_tokens=8)
    assert [span.version for span in completion.versions] == [22]


@pytest.mark.parametrize(
    "setting",
    [
        {"top_k": 12},
        {"top_k": 40, "top_p": 0.8, "temperature": 0.7},
        {"top_k": 40, "min_p": 0.1, "temperature": 1.3},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 0.5},
        {"top_k": 128, "top_p": 0.999},
    ],
    ids=str,
)
async def test_learner_and_server_score_supports_alike(served: Served, setting: dict[str, Any]) -> None:
    """The learner's code scores over the support that the server returned, and this support follows from the settings."""
    await served.swap(1)
    sampling = Sampling(**setting, supports=True)
    prompts = [[*PROMPT, i] for i in range(8)]
    # Requests with other settings in the same batch, as if an evaluation runs during rollouts.
    without_supports = [served.generate(PROMPT, max_tokens=40, temperature=temperature) for temperature in (0.0, 1.0)]
    with_supports = [served.generate(prompt, max_tokens=40, supports=True, **setting) for prompt in prompts]
    completions = (await asyncio.gather(*with_supports, *without_supports))[: len(prompts)]
    for prompt, completion in zip(prompts, completions, strict=True):
        logprobs, logits = learners_logprobs(served.models[1], prompt, completion, sampling.temperature)
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-3)
        assert completion.supports is not None
        for row, support in zip(logits, completion.supports.rows, strict=True):
            check_support(row, support, sampling)
    assert len({len(support) for completion in completions for support in completion.supports.rows}) > (1 if sampling.min_p else 0)


def learners_logprobs(model: Any, prompt: list[int], completion: Completion, temperature: float) -> tuple[list[float], Any]:
    """The logprobs of a completion's tokens over their supports by `TokenScorer`, and all float64 logits divided by the temperature."""
    import torch

    from agentrl.learner.packing import build_micro_batch
    from agentrl.learner.token_scorer import LogprobHead

    ids = (*prompt, *completion.token_ids)
    mask = tuple(position >= len(prompt) for position in range(len(ids)))
    sample = Sample(
        episode_id="e",
        group_index=0,
        token_ids=ids,
        loss_mask=mask,
        logprobs=(0.0,) * len(ids),
        versions=tuple(0 if trained else -1 for trained in mask),
        advantages=(0.0,) * len(ids),
        supports=Supports.join([len(prompt), completion.supports or len(completion.token_ids)]),
    )
    batch = build_micro_batch((sample,), torch.device("cpu"))
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0, batch.positions]
        logprobs, _ = LogprobHead(model.lm_head, 10**6)(hidden, batch.targets, temperature, batch.supports)
        logits = model.lm_head(hidden).double() / temperature
    return logprobs[batch.expand].tolist(), logits[batch.expand]


def check_support(logits: Any, support: tuple[int, ...], sampling: Sampling) -> None:
    """A support has the tokens that the settings define, except for tokens at an edge, where rounding decides."""
    slack = 1e-3
    order = logits.argsort(descending=True).tolist()
    assert sorted(support, key=order.index) == order[: len(support)] or logits[list(support)].min() > logits[order[len(support)]] - slack
    assert len(support) <= sampling.top_k
    alive = [token for token in order if logits[token] >= logits[order[0]] + math.log(max(sampling.min_p, 1e-300)) - slack]
    alive = alive[: sampling.top_k]
    chances = logits[alive].softmax(-1)
    before = chances.cumsum(-1) - chances  # a token is included if the tokens before it have less than top_p
    certain, possible = int((before < sampling.top_p - slack).sum()), int((before < sampling.top_p + slack).sum())
    edge = int((logits[alive] <= logits[order[0]] + math.log(max(sampling.min_p, 1e-300)) + slack).sum())
    assert certain - edge <= len(support) <= possible


async def test_a_swap_is_probed_with_the_rollouts_sampling_settings(served: Served) -> None:
    """The learner's logprobs of the next tokens of each row, over the support that the server returns for its sampled token."""
    import torch

    recipe = served.server.recipe
    setting = {"rollout.sampling.temperature": 0.6, "rollout.sampling.top_k": 20, "rollout.sampling.top_p": 0.9}
    probe = served.probes[1]
    with torch.no_grad():
        last = torch.stack([served.models[1](torch.tensor([ids])).logits[0, -1] for ids in probe.token_ids])
    matching, differing = (
        dataclasses.replace(
            probe,
            next_ids=tuple(map(tuple, best.indices.tolist())),
            next_logprobs=tuple(map(tuple, best.values.tolist())),
        )
        for best in ((last / temperature).log_softmax(-1).topk(60) for temperature in (0.6, 0.7))
    )
    served.server.recipe = recipe.but(setting)
    try:
        served.probes[1] = matching
        assert (await served.swap(1)).probe_max_abs_diff < 1e-3
        served.probes[1] = differing
        with pytest.raises(SwapError, match="server and learner differ"):
            await served.swap(1)
    finally:
        served.server.recipe, served.probes[1] = recipe, probe


async def test_a_delta_of_another_version_than_the_servers_is_loaded_as_a_complete_file(served: Served, tmp_path: Path) -> None:
    import torch

    model, complete_files = make_model(seed=1), {}
    versions: dict[int, PolicyVersion] = {}

    def publish(number: int, parent: int | None) -> None:
        """As the learner does: a complete file, or only a delta of the parent."""
        written = write_version(tmp_path, number, model)
        folder = served.server.run_dir / f"versions/{number:06d}"
        shutil.move(tmp_path / written.folder, folder)
        complete_files[number] = tmp_path / f"{number}.safetensors"
        shutil.copyfile(folder / "model.safetensors", complete_files[number])
        if parent is not None:
            assert deltas.write_delta(complete_files[parent], complete_files[number], folder, number=parent) is not None
            (folder / "model.safetensors").unlink()
        versions[number] = dataclasses.replace(written, folder=f"versions/{number:06d}", parent=parent)

    async def swap(number: int) -> None:
        folder = served.server.run_dir / versions[number].folder
        report = await served.channel.swap(versions[number], folder, make_probe(model), max_abs_diff=1e-3, timeout_s=300)
        assert report.version == number

    for number, parent in ((30, None), (31, 30), (32, 31), (33, 31)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn_like(parameter) * (torch.rand_like(parameter) < 0.05)
        publish(number, parent)
        await swap(number)
        has_complete_file = (served.server.run_dir / versions[number].folder / "model.safetensors").exists()
        # 33 is a delta of 31, but the server has 32: the server refuses the delta and loads a complete file
        assert has_complete_file == (number in (30, 33)), number
    folder = served.server.run_dir / versions[32].folder
    (folder / "model.delta").write_bytes((folder / "model.delta").read_bytes()[:-9])
    with pytest.raises(SwapError, match="sha256 differs"):
        await swap(32)
    assert (await served.generate(PROMPT, max_tokens=4)).versions[0].version == 33


class Uneven:
    """The server's policy; attempts from number `short` on get long completions."""

    def __init__(self, served: Served, short: int) -> None:
        self.client, self.short = served.client, short

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        most = 8 if int(request_id.split("-")[1]) < self.short else params.max_tokens
        params = dataclasses.replace(params, max_tokens=most, stop_token_ids=())
        return await self.client.generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)


def live_runner(policy: Policy) -> EpisodeRunner:
    """Runs episodes of a policy whose chat starts each turn with reasoning, which random weights never end."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<|{number}|>" for number in range(len(tokenizer), VOCABULARY)])
    opening = "{% if add_generation_prompt %}<|im_start|>assistant\n"
    assert opening in tokenizer.chat_template
    template = tokenizer.chat_template.replace("{{ m.content }}{% for", "{{ m.content.split('</think>')[-1] }}{% for")
    tokenizer.chat_template = template.replace(opening, f"{opening}<think>\n")
    return restarting(policy, tokenizer, max_model_len=1024)


async def test_thinking_is_ended_while_the_server_samples(task: Task, served: Served) -> None:
    await served.swap(1)
    limits = Limits(turns=1, turn_tokens=80, episode_tokens=600, thinking_tokens=24)
    runner, bounded = live_runner(served.client), dataclasses.replace(task, limits=limits)
    episodes = await asyncio.gather(*(runner.run(bounded, episode_id=f"think-{number}") for number in range(8)))
    turns = [turn for episode in episodes for turn in episode.trajectories[0].turns]
    assert sum(bool(turn.forced) for turn in turns) >= 6, "nearly every turn is cut during its reasoning"
    for turn in turns:
        expected = token_logprobs(served.models[1], turn.prompt_ids + turn.completion_ids)[len(turn.prompt_ids) - 1 :]
        sampled = [at for at in range(len(turn.completion_ids)) if at not in turn.forced]
        assert [turn.logprobs[at] for at in sampled] == pytest.approx([expected[at] for at in sampled], abs=1e-3)
        assert all(turn.logprobs[at] == 0.0 for at in turn.forced) and min(turn.forced, default=24) == 24


async def test_cancelled_requests_stop_sampling(task: Task, served: Served) -> None:
    async def score(task: Task, episode: Episode) -> Score:
        return Score(value=1.0)

    async def sampled() -> float:
        return (await served.server.control.metrics())["vllm:generation_tokens_total"]

    long = dataclasses.replace(task, limits=Limits(turns=1, turn_tokens=900, episode_tokens=1000))
    slots, before = asyncio.Semaphore(64), await sampled()
    runner = GroupRunner(runner=live_runner(Uneven(served, 3)), scorer=score, slots=slots, group_size=3, spare_attempts=5, max_retries=0)
    group = await runner.run_group(0, long)
    assert [0 < scored.episode.completion_tokens <= 8 for scored in group.episodes] == [True] * 3  # random weights may end the turn sooner
    assert len(group.cancelled) == 5 and all(attempt.begun for attempt in group.cancelled)
    await asyncio.sleep(1)
    after = await sampled()
    await asyncio.sleep(1)
    assert await sampled() == after and after - before < 5 * 900, "the server continues cancelled requests"


async def test_an_idle_server_uses_no_cpu(served: Served) -> None:
    def cpu_seconds() -> float:
        total = 0
        for pid in group_members(served.server.pid or 0):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    cpu_s = []
    for _ in range(5):  # earlier requests may still be ending; a spinning server never idles
        before = cpu_seconds()
        await asyncio.sleep(2)
        cpu_s.append(cpu_seconds() - before)
        if cpu_s[-1] < 0.2:
            return
    pytest.fail(f"CPU time in each 2 s: {cpu_s}")


async def test_a_dead_engine_is_detected_and_stop_leaves_no_process(served: Served) -> None:
    server = served.server
    pid = server.pid
    assert pid is not None and server._process is not None
    members, shared, scratch = group_members(pid), shared_memory(pid), Path(server._process.scratch)
    assert scratch.is_dir()
    engine = max(set(members) - {pid}, key=lambda member: int(Path(f"/proc/{member}/statm").read_text().split()[1]))
    requests = [asyncio.create_task(served.generate(PROMPT, max_tokens=900)) for _ in range(32)]
    await asyncio.sleep(0.3)
    os.kill(engine, signal.SIGKILL)
    results = await asyncio.gather(*requests, return_exceptions=True)
    cut_short = [error for error in results if not isinstance(error, Completion)]  # other requests may have finished in time
    assert cut_short and all(isinstance(error, ServingError) for error in cut_short), cut_short
    async with asyncio.timeout(120):
        while await server.alive():
            await asyncio.sleep(0.05)
    await server.stop()
    await server.stop()
    assert group_members(pid) == []
    assert not any(path.exists() for path in shared)
    assert not await server.alive()
    assert not scratch.exists()


async def test_a_start_measures_the_servers_speed(served: Served) -> None:
    assert 0 < served.server.prompt_token_s < 1.0 and 0 < served.server.token_s < 10.0
    assert served.server.liveness.needs_s == served.server.prompt_token_s * RECIPE.policy.max_model_len
