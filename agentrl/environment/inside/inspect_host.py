"""Runs the samples of one inspect task as episodes: `host_channel.py`'s protocol on top of inspect's `SampleSource`.

One `eval_async` runs for the life of the process. Each episode is a sample with an epoch of its own; its model calls go to the gateway with
the episode's key, and its tools run in the episode's sandbox.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import hashlib
import importlib
import importlib.util
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from typing import Any

from host_channel import INFRASTRUCTURE, MAX_TEXT, TASK, Caller, Channel, Fault, describe_error, main

os.environ |= {"INSPECT_DISPLAY": "none", "INSPECT_LOG_LEVEL": "warning", "INSPECT_TELEMETRY": ""}

MAX_TURNS_TEXT = "All turns of this episode are used up."
MAX_SAMPLES = 100_000
MAX_INPUT = 20_000
LIMITS = {"turn_limit", "session_ended"}  # error codes of the gateway after which no completion is possible
_WORDS = {"c": 1.0, "p": 0.5, "i": 0.0, "n": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def load_attribute(reference: str) -> Any:
    """Returns `module@name` or `path/file.py@name`. Raises `Fault`."""
    module, sep, name = reference.rpartition("@")
    if not sep or not module or not name:
        raise Fault(TASK, f"{reference!r} is not a reference to a task: write module@task or path/file.py@task")
    try:
        if module.endswith(".py"):
            if not os.path.isfile(module):
                raise Fault(TASK, f"{module}: no such file; paths are relative to the project")
            spec = importlib.util.spec_from_file_location(os.path.basename(module)[:-3], module)
            assert spec is not None and spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = loaded
            sys.path.insert(0, os.path.dirname(os.path.abspath(module)))
            spec.loader.exec_module(loaded)
        else:
            loaded = importlib.import_module(module)
    except Fault:
        raise
    except ImportError as error:
        missing = getattr(error, "name", None)
        fix = f"; add {missing} to the environment with `agentrl env add`" if missing and missing != module else ""
        raise Fault(TASK, f"{module} cannot be imported: {describe_error(error)}{fix}") from error
    except BaseException as error:
        raise Fault(TASK, f"{module} cannot be imported: {describe_error(error)}") from error
    if not hasattr(loaded, name):
        from inspect_ai._util.registry import is_registry_object

        known = sorted(key for key, value in vars(loaded).items() if is_registry_object(value, type="task"))
        raise Fault(TASK, f"{module} has no task {name!r}; its tasks are: {', '.join(known) or 'none'}")
    return getattr(loaded, name)


def load_task(config: dict[str, Any]) -> Any:
    """Returns the inspect task of a configuration. Raises `Fault`."""
    from inspect_ai import Task, task_with

    sys.path[:0] = config["path"]
    create = load_attribute(config["task"])
    try:
        task = create(**config["args"])
    except BaseException as error:
        raise Fault(TASK, f"{config['task']}(**{config['args']}) failed: {describe_error(error)}") from error
    if not isinstance(task, Task):
        raise Fault(TASK, f"{config['task']} returned a {type(task).__name__}, not an inspect_ai.Task: name a function with @task")
    if config["solver"]:
        try:
            task = task_with(task, solver=load_attribute(config["solver"])())
        except Fault:
            raise
        except BaseException as error:
            raise Fault(TASK, f"solver {config['solver']} failed: {describe_error(error)}") from error
    if not task.scorer:
        raise Fault(TASK, f"{config['task']} has no scorer, so its samples have no score: add one to the task")
    return task


def samples_of(task: Any) -> dict[str, Any]:
    """Returns the samples of a task by id; a sample without one gets its number, as inspect does. Raises `Fault`."""
    samples = {}
    if len(task.dataset) > MAX_SAMPLES:
        raise Fault(TASK, f"the task has {len(task.dataset)} samples; the maximum is {MAX_SAMPLES}: limit it with an argument of the task")
    for number, sample in enumerate(task.dataset, 1):
        sample.id = number if sample.id is None else sample.id
        if str(sample.id) in samples:
            raise Fault(TASK, f"two samples have the id {sample.id!r}")
        samples[str(sample.id)] = sample
    if not samples:
        raise Fault(TASK, "the task has no samples")
    return samples


def describe(config: dict[str, Any]) -> Any:
    """Returns the task's samples: id, text of the input, digest of the content, and whether it needs a sandbox."""
    task = load_task(config)
    described = []
    for name, sample in samples_of(task).items():
        content = json.dumps(sample.model_dump(mode="json", fallback=str), sort_keys=True, default=str)
        text = sample.input if isinstance(sample.input, str) else "\n\n".join(message.text for message in sample.input)
        sandbox = sample.sandbox or task.sandbox
        described.append(
            {
                "id": name,
                "input": text[:MAX_INPUT],
                "sha256": hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest(),
                "sandbox": None if sandbox is None else _sandbox_config(sandbox),
            }
        )
    return {"name": task.name, "samples": described}


def _sandbox_config(sandbox: Any) -> str:
    """Returns the path of the sandbox's configuration; empty if it has none, or one that is not a file."""
    return sandbox.config if isinstance(sandbox.config, str) else ""


class Episode:
    """One sample in progress."""

    def __init__(self, params: dict[str, Any], caller: Caller) -> None:
        self.base_url, self.key = params["base_url"], params["key"]
        self.turns: int = params["turns"]
        self.caller = caller
        self.used = 0  # completions so far
        self.scoring = False
        self.stop = ""
        self.fault: Fault | None = None
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def fail(self, blame: str, message: str) -> Fault:
        """Records the first fault that is not the task's code, and returns it."""
        self.fault = self.fault or Fault(blame, message)
        return self.fault


class Samples:
    """Feeds episodes to the running task."""

    def __init__(self) -> None:
        self.samples: dict[str, Any] = {}
        self.score = ""
        self.values: dict[str, float] = {}
        self._episodes: dict[int, Episode] = {}  # by epoch, which is unique in this process
        self._epochs = count(1)
        self._ready: asyncio.Future[contextvars.Context] | None = None
        self._wanted = asyncio.Event()

    def current(self) -> Episode:
        """Returns the episode of the sample that runs in this context. Raises `Fault`."""
        from inspect_ai.log._samples import sample_active

        active = sample_active()
        if active is None or active.epoch not in self._episodes:
            raise Fault(TASK, "the task uses the policy or its sandbox outside of a sample")
        return self._episodes[active.epoch]

    async def play(self, params: dict[str, Any], caller: Caller) -> Any:
        """Runs a sample and returns its score."""
        from inspect_ai._eval.task.sample_source import enqueue_sample
        from inspect_ai.log._samples import active_samples

        sample = self.samples.get(str(params["data"]["sample"]))
        if sample is None:
            raise Fault(TASK, f"the task has no sample {params['data']['sample']!r} any more")
        context = await asyncio.shield(self._context())
        epoch, episode = next(self._epochs), Episode(params, caller)
        self._episodes[epoch] = episode
        context.run(enqueue_sample, copy.deepcopy(sample), epoch=epoch)
        self._wanted.set()

        def interrupt(action: str) -> None:
            for active in active_samples():
                if active.epoch == epoch:
                    active.interrupt(action)

        def out_of_time() -> None:
            episode.stop = "wall_limit"
            interrupt("score")

        timer = asyncio.get_running_loop().call_later(params["solve_s"], out_of_time)
        try:
            return self._result(await episode.done, episode)
        except asyncio.CancelledError:
            interrupt("cancel")
            raise
        finally:
            timer.cancel()
            del self._episodes[epoch]

    def _context(self) -> asyncio.Future[contextvars.Context]:
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
        return self._ready

    async def next_samples(self) -> list[Any]:
        """Waits until a sample was enqueued. The first call shows the context in which samples can be."""
        if not self._context().done():
            self._context().set_result(contextvars.copy_context())
        await self._wanted.wait()
        self._wanted.clear()
        return []

    async def sample_complete(self, sample: Any) -> None:
        """Ends the episode of a sample."""
        episode = self._episodes.get(sample.epoch)
        if episode is not None and not episode.done.done():
            episode.done.set_result(sample)

    async def sample_abandoned(self, sample: Any, epoch: int) -> None:
        """Ends the episode of a sample that did not run."""
        episode = self._episodes.get(epoch)
        if episode is not None and not episode.done.done():
            episode.done.set_exception(Fault(INFRASTRUCTURE, "inspect abandoned the sample"))

    def _result(self, sample: Any, episode: Episode) -> dict[str, Any]:
        scores = {name: each for name, each in (sample.scores or {}).items()}
        result = score_result(scores, self.score, self.values)
        if sample.limit is not None and not episode.stop:
            episode.stop = {"turn": "turn_limit", "custom": "turn_limit"}.get(sample.limit.type, f"{sample.limit.type}_limit")
        answers = [score.answer for score in scores.values() if score.answer]
        result |= {"stop": episode.stop or "answered", "answer": answers[0] if answers else sample.output.completion}
        if episode.fault is not None:
            result["fault"] = {"blame": episode.fault.blame, "message": str(episode.fault)[:MAX_TEXT]}
        elif sample.error is not None:
            result["fault"] = {"blame": INFRASTRUCTURE, "message": f"the sample failed: {sample.error.message}"[:MAX_TEXT]}
        return result


def score_result(scores: dict[str, Any], chosen: str, values: dict[str, float]) -> dict[str, Any]:
    """Returns the value of a sample, its parts and evidence.

    Each scorer is a part; the entries of a dictionary or list are parts of their own, and its value is their mean. The sample's value is the
    mean of its scorers, or the part `chosen`. A scorer that could not score leaves the sample without a value.

    Args:
        values: word -> number, in addition to inspect's C, P, I, N, yes, no, true and false.
    """
    parts: dict[str, float] = {}
    missing: list[str] = []
    for name, score in scores.items():
        value = score.value
        if isinstance(value, dict | list | tuple):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            numbers = {f"{name}/{key}": _number(each, values) for key, each in entries if each is not None}
            found = {key: number for key, number in numbers.items() if number is not None}
            parts |= found
            missing += [f"{key} has no numeric value" for key in numbers if key not in found]
            if found and len(found) == len(numbers):
                parts[name] = sum(found.values()) / len(found)
            elif not numbers:
                missing.append(f"{name} returned no entries")
        elif (number := _number(value, values)) is not None:
            parts[name] = number
        elif isinstance(value, float):
            missing.append(f"{name}: unscored{f': {score.reason}' if score.reason else ''}")
        else:
            missing.append(f"{name} returned {value!r:.80}, which is not a number: map it with the option values")
    evidence = "\n".join(f"{name}: {score.explanation}" for name, score in scores.items() if score.explanation)[:MAX_TEXT]
    result = {"parts": parts, "evidence": evidence, "value": None}
    if chosen:
        if chosen in parts:
            return result | {"value": parts[chosen]}
        return result | {"reason": "; ".join([*missing, f"the sample has no score {chosen!r}"])[:MAX_TEXT]}
    if missing or not scores:
        return result | {"reason": "; ".join(missing)[:MAX_TEXT] or "no scorer returned a score"}
    return result | {"value": sum(parts[name] for name in scores) / len(scores)}


def _number(value: Any, values: dict[str, float]) -> float | None:
    if isinstance(value, str):
        if value in values:
            return values[value]
        if value.lower() in _WORDS:
            return _WORDS[value.lower()]
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


SAMPLES = Samples()


async def play(params: dict[str, Any], caller: Caller) -> Any:
    """Runs one episode."""
    return await SAMPLES.play(params, caller)


def policy_model(current: Callable[[], Episode]) -> Any:
    """Returns the model `agentrl/policy`, which requests completions from the gateway with the key of the current episode."""
    from inspect_ai.model import GenerateConfig, get_model, modelapi
    from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
    from inspect_ai.util import LimitExceededError

    class Policy(OpenAICompatibleAPI):
        def max_connections(self) -> int:
            return MAX_SAMPLES

        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: GenerateConfig) -> Any:
            episode = current()
            if episode.scoring:
                raise episode.fail(TASK, "the task's scorer asks the policy to grade itself: set another model with the option model_roles")
            if episode.used >= episode.turns:
                raise LimitExceededError("turn", value=episode.used, limit=episode.turns, message=MAX_TURNS_TEXT)
            api = copy.copy(self)
            api.client = self.client.with_options(base_url=episode.base_url, api_key=episode.key, max_retries=2, timeout=3600.0)
            names = ("max_tokens", "stop_seqs", "parallel_tool_calls", "response_schema")  # the recipe sets the sampling
            kept = GenerateConfig(**{name: getattr(config, name) for name in names})
            output = await OpenAICompatibleAPI.generate(api, input, tools, tool_choice, kept)
            episode.used += 1
            return output

        def handle_bad_request(self, ex: Any) -> Any:
            if getattr(ex, "code", None) in LIMITS:
                raise LimitExceededError("turn", value=0, limit=0, message=str(ex))
            return super().handle_bad_request(ex)

    modelapi(name="agentrl")(Policy)
    return get_model("agentrl/policy", base_url="http://127.0.0.1", api_key="-", service="agentrl", memoize=False)


def watch_scoring(current: Callable[[], Episode]) -> None:
    """Marks an episode whose scorers start."""
    from inspect_ai.hooks import Hooks, SampleScoring, hooks

    @hooks(name="agentrl", description="Marks samples that are being scored.")
    class Scoring(Hooks):
        async def on_sample_scoring(self, data: SampleScoring) -> None:
            current().scoring = True


async def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Runs the task until the channel closes."""
    from inspect_ai import eval_async, task_with
    from inspect_ai._eval.task.sample_source import SampleSource
    from inspect_sandbox import EpisodeSandbox

    task = load_task(config)
    feed = SAMPLES
    feed.samples, feed.score, feed.values = samples_of(task), config["score"], config["values"]
    for sample in feed.samples.values():
        if sample.sandbox is not None or task.sandbox is not None:
            sample.sandbox = type(sample.sandbox or task.sandbox)("agentrl")
    source = SampleSource.from_samples(
        [], next_samples=feed.next_samples, sample_complete=feed.sample_complete, sample_abandoned=feed.sample_abandoned
    )
    EpisodeSandbox.caller_of_sample = staticmethod(lambda: feed.current().caller)
    watch_scoring(feed.current)
    with tempfile.TemporaryDirectory(prefix="agentrl-inspect-") as logs:
        await eval_async(
            task_with(task, dataset=source, sandbox="agentrl" if task.sandbox is not None else None, epochs=1),
            model=policy_model(feed.current),
            model_roles=config["model_roles"] or None,
            log_dir=logs,
            log_samples=False,
            log_realtime=False,
            log_model_api=False,
            fail_on_error=False,
            continue_on_fail=True,
            retry_on_error=0,
            score_on_error=True,
            score_display=False,
            max_samples=MAX_SAMPLES,
            max_subprocesses=os.cpu_count(),
            ctl_server=False,
        )


if __name__ == "__main__":
    main(describe, serve, play)
