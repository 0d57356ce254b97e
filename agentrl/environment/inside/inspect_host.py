"""Runs the samples of one inspect task as episodes. Implements `host_channel.py`'s protocol on top of inspect's `SampleSource`.

A single call of `eval_async` runs for the lifetime of the process. Each episode is a sample with a unique epoch. The episode's model calls
go to the gateway with the episode's key, and its tools run in the episode's sandbox. With the solver `agentrl`, agentrl's turn loop has
already played the episode, and only the scorers run here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from host_channel import INFRASTRUCTURE, MAX_TEXT, TASK, Caller, Channel, Fault, main
from inspect_samples import MAX_SAMPLES, OWN_SOLVER, describe, load_task, samples_of, score_result

os.environ |= {"INSPECT_DISPLAY": "none", "INSPECT_LOG_LEVEL": "warning", "INSPECT_TELEMETRY": ""}

LIMITS = {"turn_limit", "session_ended"}  # error codes of the gateway after which no completion is possible
POLICY_SHARE = 0.5
"""An episode that runs out of time is scored only if at least this fraction of the time was spent on completions and in its sandbox.
Otherwise, the task's code used up the time, which is not the policy's fault."""


class Episode:
    """One sample in progress."""

    def __init__(self, params: dict[str, Any], caller: Caller) -> None:
        self.base_url, self.key = params["base_url"], params["key"]
        self.turns: int = params["turns"]
        self.ended: dict[str, Any] = params.get("ended") or {}
        self.caller = BusyCaller(self, caller)
        self.used = 0  # completions so far
        self.busy_s = 0.0  # seconds in completions and in the sandbox
        self.scoring = False
        self.stop = ""
        self.fault: Fault | None = None
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def fail(self, blame: str, message: str) -> Fault:
        """Records a fault that does not come from the task's code, unless a fault is already recorded. Returns the recorded fault."""
        self.fault = self.fault or Fault(blame, message)
        return self.fault

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Adds the duration of the `with` block to the time that the policy or its programs use."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.busy_s += time.monotonic() - started


class BusyCaller:
    """Sends an episode's requests, and counts the duration of each request as time that the policy or its programs use."""

    def __init__(self, episode: Episode, caller: Caller) -> None:
        self._episode, self._caller = episode, caller

    async def request(self, method: str, **params: Any) -> Any:
        """Sends a request. Records the `Fault` of a failed request before raising it, so that no tool can hide the fault."""
        with self._episode.busy():
            try:
                return await self._caller.request(method, **params)
            except Fault as fault:
                raise self._episode.fail(fault.blame, str(fault)) from None


class Samples:
    """Feeds episodes to the running task."""

    def __init__(self) -> None:
        self.samples: dict[str, Any] = {}
        self.score = ""
        self.values: dict[str, float] = {}
        self._episodes: dict[int, Episode] = {}  # by epoch; each epoch is unique in this process
        self._epochs = count(1)
        self._ready: asyncio.Future[contextvars.Context] | None = None
        self._wanted = asyncio.Event()

    def current(self) -> Episode:
        """Returns the episode of the sample that runs in this context. Raises `Fault` if no sample runs in this context."""
        from inspect_ai.log._samples import sample_active

        active = sample_active()
        if active is None or active.epoch not in self._episodes:
            raise Fault(TASK, "the task uses the policy or the sandbox outside a sample")
        return self._episodes[active.epoch]

    async def play(self, params: dict[str, Any], caller: Caller) -> Any:
        """Runs a sample and returns its score. Raises `Fault` if the task no longer has the sample, or if inspect abandons the sample."""
        from inspect_ai._eval.task.sample_source import enqueue_sample
        from inspect_ai.log._samples import active_samples

        sample = self.samples.get(str(params["data"]["sample"]))
        if sample is None:
            raise Fault(TASK, f"the task no longer has the sample {params['data']['sample']!r}")
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
            if episode.busy_s < POLICY_SHARE * params["solve_s"]:
                episode.fail(INFRASTRUCTURE, f"the task's code took most of the {params['solve_s']:g} s and did not finish")
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
        """Waits until a sample is enqueued. The first call stores the context in which samples can be enqueued."""
        if not self._context().done():
            self._context().set_result(contextvars.copy_context())
        await self._wanted.wait()
        self._wanted.clear()
        return []

    async def sample_complete(self, sample: Any) -> None:
        """Finishes the episode of a completed sample."""
        episode = self._episodes.get(sample.epoch)
        if episode is not None and not episode.done.done():
            episode.done.set_result(sample)

    async def sample_abandoned(self, sample: Any, epoch: int) -> None:
        """Fails the episode of a sample that inspect abandoned."""
        episode = self._episodes.get(epoch)
        if episode is not None and not episode.done.done():
            episode.done.set_exception(Fault(INFRASTRUCTURE, "inspect abandoned the sample"))

    def _result(self, sample: Any, episode: Episode) -> dict[str, Any]:
        scores = dict(sample.scores or {})
        result: dict[str, Any] = score_result(scores, self.score, self.values)
        if sample.limit is not None and not episode.stop:
            episode.stop = {"turn": "turn_limit", "custom": "turn_limit"}.get(sample.limit.type, f"{sample.limit.type}_limit")
        answers = [score.answer for score in scores.values() if score.answer]
        result |= {"stop": episode.stop or "answered", "answer": answers[0] if answers else sample.output.completion}
        if episode.fault is not None:
            result["fault"] = {"blame": episode.fault.blame, "message": str(episode.fault)[:MAX_TEXT]}
        elif sample.error is not None:
            result["fault"] = {"blame": INFRASTRUCTURE, "message": f"the sample failed: {sample.error.message}"[:MAX_TEXT]}
        return result


SAMPLES = Samples()


async def play(params: dict[str, Any], caller: Caller) -> Any:
    """Runs one episode."""
    return await SAMPLES.play(params, caller)


def ended_episode() -> Any:
    """Returns a solver that sets the sample's state to the end of an episode that agentrl's turn loop has played."""
    from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageTool, ChatMessageUser, ModelOutput
    from inspect_ai.solver import solver
    from inspect_ai.tool import ToolCall

    kinds = {"system": ChatMessageSystem, "user": ChatMessageUser, "tool": ChatMessageTool, "assistant": ChatMessageAssistant}

    @solver(name="agentrl")
    def ended() -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            given = SAMPLES.current().ended
            state.messages = []
            for message in given["messages"]:
                more = {name: message[name] for name in ("tool_call_id",) if name in message}
                if message.get("tool_calls"):
                    more["tool_calls"] = [ToolCall(**call) for call in message["tool_calls"]]
                state.messages.append(kinds[message["role"]](content=message["content"], **more))
            state.output = ModelOutput.from_content("agentrl/policy", given["answer"])
            return state

        return solve

    return ended()


def policy_model(current: Callable[[], Episode]) -> Any:
    """Returns the model `agentrl/policy`, which requests completions from the gateway with the key of the current episode."""
    from inspect_ai.model import GenerateConfig, get_model, modelapi
    from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
    from inspect_ai.util import LimitExceededError

    class Policy(OpenAICompatibleAPI):
        def max_connections(self) -> int:
            return 100_000  # the gateway limits them

        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: GenerateConfig) -> Any:
            episode = current()
            if episode.scoring:
                raise episode.fail(
                    TASK, "the task's scorer grades with the policy itself: set a different model with the option model_roles"
                )
            if episode.used >= episode.turns:
                raise LimitExceededError("turn", value=episode.used, limit=episode.turns, message="all turns of this episode are used up")
            api = copy.copy(self)
            api.client = self.client.with_options(base_url=episode.base_url, api_key=episode.key, max_retries=2, timeout=3600.0)
            names = ("max_tokens", "stop_seqs", "parallel_tool_calls", "response_schema")  # the recipe sets the sampling parameters
            settings = GenerateConfig(**{name: getattr(config, name) for name in names})
            episode.used += 1
            with episode.busy():
                return await OpenAICompatibleAPI.generate(api, input, tools, tool_choice, settings)

        def handle_bad_request(self, ex: Any) -> Any:
            if getattr(ex, "code", None) in LIMITS:
                raise LimitExceededError("turn", value=0, limit=0, message=str(ex))
            return super().handle_bad_request(ex)

    modelapi(name="agentrl")(Policy)
    return get_model("agentrl/policy", base_url="http://127.0.0.1", api_key="-", service="agentrl", memoize=False)


def watch_scoring(current: Callable[[], Episode]) -> None:
    """Registers a hook that marks an episode when its scorers start."""
    from inspect_ai.hooks import Hooks, SampleScoring, hooks

    @hooks(name="agentrl", description="Marks samples that are being scored.")
    class Scoring(Hooks):
        async def on_sample_scoring(self, data: SampleScoring) -> None:
            current().scoring = True


async def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Runs the task until the channel closes. Raises `RuntimeError` if inspect ends the task earlier."""
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
    solver = {"solver": ended_episode(), "setup": None} if config["solver"] == OWN_SOLVER else {}
    with tempfile.TemporaryDirectory(prefix="agentrl-inspect-") as logs:
        os.environ["INSPECT_CACHE_DIR"] = logs  # a new folder, so that no answer comes from an earlier cache
        [log] = await eval_async(
            task_with(task, dataset=source, sandbox="agentrl" if task.sandbox is not None else None, epochs=1, **solver),
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
            time_limit=math.ceil(config["wall_s"]),  # inspect limits the scorers to half of it
            ctl_server=False,
        )
    raise RuntimeError(f"inspect ended the task: {log.error.message if log.error is not None else log.status}")


if __name__ == "__main__":
    main(describe, serve, play)
