"""Adapter for packages for verifiers 0.3, which export `load_environment`. Used by `verifiers_host.py`."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable
from itertools import islice
from typing import Any

from host_channel import INFRASTRUCTURE, TASK, Caller, Fault, describe_error
from load_hints import load_hint
from openai import AsyncOpenAI
from verifiers.legacy.clients.openai_chat_completions_client import OpenAIChatCompletionsClient
from verifiers.legacy.rubrics.rubric import Rubric
from verifiers.legacy.utils.async_utils import maybe_await
from verifiers.legacy.utils.env_utils import load_environment
from verifiers_data import MAX_TEXT, described, finite

STOPS = {"max_turns_reached": "turn_limit", "prompt_too_long": "token_limit", "timeout_reached": "wall_limit"}


class Legacy:
    """A verifiers 0.3 environment and its datasets. The constructor raises `Fault` if the environment cannot be loaded, an option
    applies only to verifiers 0.4, or a reward compares attempts."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._size = config["size"]
        if config["env"] or config["runtime"] != "subprocess" or config["sandboxed"]:
            raise Fault(TASK, "the options env, image and runtime apply only to packages for verifiers 0.4: use args")
        Rubric._call_individual_reward_func = _strict_reward
        try:
            self._env = load_environment(config["package"], **config["args"])
            self._own = {name: getattr(self._env, name) for name in ("max_turns", "timeout_seconds") if hasattr(self._env, name)}
            grouped = self._env.requires_group_rollouts or self._env.provides_advantages
        except BaseException as error:
            raise Fault(TASK, f"{config['package']}: {describe_error(error)}{load_hint(error)}") from error
        if grouped:
            raise Fault(
                TASK, f"{config['package']}: its rewards compare the attempts at a task, but agentrl scores each attempt separately"
            )

    def describe(self) -> list[dict[str, Any]]:
        """Returns the first `size` tasks in each of the two datasets. Raises `Fault` if the tasks cannot be loaded."""
        try:
            self._env.build_eval_dataset()
            heldout = [] if self._env.eval_dataset is None else self._rows(self._env.get_eval_dataset())
            self._env.build_dataset()
            train = [] if self._env.dataset is None else self._rows(self._env.get_dataset())
        except BaseException as error:
            raise Fault(TASK, f"loading its tasks failed: {describe_error(error)}{load_hint(error)}") from error
        return [*described(train, "train" if heldout else ""), *described(heldout, "heldout" if train else "")]

    def _rows(self, dataset: Any) -> list[tuple[str, str, Any]]:
        rows = (dict(row) for row in islice(iter(dataset), self._size))
        return [(f"{row.get('example_id', number)}", _text(row.get("prompt")), row) for number, row in enumerate(rows)]

    async def serve(self, ready: Callable[[], None]) -> None:
        """Waits until this task is cancelled, then frees the environment."""
        ready()
        try:
            await asyncio.Event().wait()
        finally:
            await self._env._teardown()

    async def play(self, params: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """Plays one episode and returns its score."""
        async with AsyncOpenAI(base_url=params["base_url"], api_key=params["key"], max_retries=2, timeout=None) as client:
            policy = OpenAIChatCompletionsClient(client)
            row = json.loads(params["data"]["task"])
            most = {"max_turns": params["turns"], "timeout_seconds": params["solve_s"]}
            for name, own in self._own.items():  # `run_rollout` reads `timeout_seconds` before another episode can change it
                setattr(self._env, name, most[name] if own is None or own <= 0 else min(own, most[name]))
            output = await self._env.run_rollout(row, policy, params["model"], {}, state_columns=["stop_condition"])
        return result_of(output, turns=params["turns"])


async def _strict_reward(self: Any, func: Any, state: Any) -> float:
    """Computes a reward. Raises `Fault` if the reward function raises an exception; the replaced method of verifiers 0.3 logs the exception
    and returns 0."""
    signature, merged = inspect.signature(func), self.score_objects(state)
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        merged = {name: value for name, value in merged.items() if name in signature.parameters}
    try:
        return float(await maybe_await(func, **merged))
    except Exception as error:
        raise Fault(TASK, f"the reward {getattr(func, '__name__', func)!s} failed: {describe_error(error)}") from error


def result_of(output: Any, *, turns: int) -> dict[str, Any]:
    """Returns the score of a rollout: its reward, with its metrics as parts. Without a finite reward, the value is None, and the result has
    a reason or a fault."""
    stop = STOPS.get(str(output.get("stop_condition")), "")
    if stop == "turn_limit" and (output.get("metrics") or {}).get("num_turns", 0) < turns:
        stop = ""  # the package's own limit, such as one turn
    result: dict[str, Any] = {
        "parts": finite(output.get("metrics") or {}),
        "value": None,
        "stop": stop,
        "answer": _text(output.get("completion"), last=True),
    }
    reward, error = output.get("reward"), output.get("error")
    if error is not None:
        name = str(error.get("error", error) if isinstance(error, dict) else error)
        return {**result, "fault": {"blame": INFRASTRUCTURE, "message": name[:4000]}}
    if reward is None:
        return {**result, "reason": "the package returned no reward", "blame": TASK}
    if not math.isfinite(reward):
        return {**result, "reason": f"the reward is not finite: {reward}", "blame": TASK}
    return {**result, "value": float(reward)}


def _text(messages: Any, *, last: bool = False) -> str:
    """Returns the text of all messages, or of the last message."""
    if isinstance(messages, str):
        return messages[:MAX_TEXT]
    texts = []
    for message in messages or []:
        content = message.get("content") if isinstance(message, dict) else getattr(message, "content", None)
        texts.append(content if isinstance(content, str) else "")
    return ("\n\n".join(texts[-1:] if last else texts))[:MAX_TEXT]
