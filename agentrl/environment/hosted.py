"""The agent for environments in which a program calls the model, such as an inspect solver or a verifiers harness.

The agent sends each episode to a host (`agentrl.environment.host`), with the gateway's address and a key for this episode. agentrl
therefore samples and records every token. The host returns the score.
"""

from __future__ import annotations

import asyncio
import base64
import re
import time
from asyncio import AbstractEventLoop
from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from agentrl.base.user_code import describe_error
from agentrl.environment.host import Host, HostSpec
from agentrl.errors import InfrastructureError, PolicyFault, TaskError
from agentrl.gateway.program import MODEL
from agentrl.gateway.rewards import MAX_EVIDENCE, MAX_PARTS, POSTED_REWARDS
from agentrl.gateway.server import Gateway, import_server
from agentrl.gateway.session import Session
from agentrl.gateway.tokens import Chat, ConversationTokens
from agentrl.plugins.parts import environment_kind
from agentrl.plugins.references import resolve
from agentrl.protocols import LiveEpisode, Sandbox
from agentrl.records import Blame, EnvironmentSpec, Score, Task

SCORING_SHARE = 0.2
"""Fraction of an episode's time that is reserved for scoring. When the remaining time is used up, the host stops its program and scores the
result so far."""
MAX_HOSTS = 16
MAX_ANSWER = 1 << 16
MAX_OUTPUT = 16 << 20
_hosts: WeakKeyDictionary[AbstractEventLoop, dict[str, Host]] = WeakKeyDictionary()
_STOP = re.compile(r"[a-z_]{1,32}")


class HostedAgent:
    """An `agentrl.protocols.Agent` that runs each episode in the host of the environment in its task.

    The host receives a request `play` with `episode`, `base_url`, `key` and `model` (the policy's endpoint), `data` (the task's data),
    `turns` (the maximum number of completions) and `solve_s` (seconds after which it must stop its program and score). It returns

    - `value`: the score, a finite number; or None if the episode is not scored, with a `reason` and, if known, the `blame`;
    - optionally `parts` (name -> finite number), `evidence`, `answer`, and the stop reason `stop`;
    - optionally `fault`, with `blame` and `message`, if the program failed. An episode with a fault is excluded, unless only the policy's
      text provokes the fault: then its score is `value`, or, if `value` is None, the lowest value so far in this environment or 0,
      whichever is lower.

    During `play`, the host may send `exec` requests to run programs in the episode's sandbox.
    """

    boundaries = False  # the program's state cannot be captured
    task_tools = False  # the program provides its own tools

    def __init__(self, *, chat: Chat) -> None:
        import_server()
        self._tokens = ConversationTokens(chat)
        self._gateway = Gateway()
        self._lowest: dict[str, float] = {}  # lowest value so far, by environment

    async def act(self, episode: LiveEpisode) -> str:
        """Plays the episode in its host, stores its score for `agentrl.gateway:posted_reward`, and returns the stop reason. Raises the
        errors of `host_of` and `Host.call`, the fault of the gateway's session, or the fault that the host returned."""
        task = episode.task
        if task.environment is None:
            raise TaskError(f"task {task.id!r} has no environment", fix="use rollout.agent=turns for it")
        host, started = host_of(task.environment), time.monotonic()
        episode.stage = "environment"
        await host.call("ping", {}, timeout_s=task.limits.wall_s)  # the host may still have to start
        session = Session(episode=episode, tokens=self._tokens, models=(MODEL,))
        with POSTED_REWARDS.open(episode.id):
            async with self._gateway.session(session) as key:
                solve_s = (1 - SCORING_SHARE) * max(0.0, task.limits.wall_s - (time.monotonic() - started))
                params = {
                    **{"episode": episode.id, "base_url": f"{self._gateway.url}/v1", "key": key, "model": MODEL, "data": task.data},
                    **{"turns": task.limits.turns, "solve_s": solve_s},
                }
                result = await self._play(host, params, episode, session)
                episode.stage = "environment"
            if session.fault is not None:
                raise session.fault
            return self._ended(episode, session, result)

    async def _play(self, host: Host, params: Mapping[str, Any], episode: LiveEpisode, session: Session) -> Mapping[str, Any]:
        """Returns the host's result; an empty mapping if the session ends with a fault."""
        limit_s = episode.task.limits.wall_s
        play = asyncio.create_task(host.call("play", params, timeout_s=limit_s, serve=partial(_serve, episode)))
        over = asyncio.create_task(session.over.wait())
        try:
            await asyncio.wait({play, over}, return_when=asyncio.FIRST_COMPLETED)
            return {} if session.fault is not None else as_object(await play, host)
        finally:
            over.cancel()
            play.cancel()
            await asyncio.wait({play, over})

    def _ended(self, episode: LiveEpisode, session: Session, result: Mapping[str, Any]) -> str:
        """Stores the score and returns the stop reason. If the host's program failed, raises the fault that the host returned."""
        ref = "" if episode.task.environment is None else episode.task.environment.ref
        score = score_of(result)
        fault = result.get("fault")
        if score.value is not None:
            self._lowest[ref] = min(score.value, self._lowest.get(ref, score.value))
        elif isinstance(fault, Mapping):
            score = Score(value=min(0.0, self._lowest.get(ref, 0.0)), evidence=f"not scored: {str(fault.get('message'))[:1000]}")
        POSTED_REWARDS.store(episode.id, score)
        episode.answer = str(result.get("answer") or "")[:MAX_ANSWER] or session.last_words()
        if isinstance(fault, Mapping):
            text = f"{ref}: {str(fault.get('message'))[:4000]}"
            raise {"task": TaskError, "policy": PolicyFault}.get(str(fault.get("blame")), InfrastructureError)(text)
        stop = str(result.get("stop") or "")
        return session.limit or (stop if _STOP.fullmatch(stop) else "answered")


def is_hosted(task: Task) -> bool:
    """Whether the task's environment has a program that calls the model."""
    kind = None if task.environment is None else environment_kind(task.environment.ref)
    return kind is not None and bool(kind.host)


def host_of(spec: EnvironmentSpec) -> Host:
    """Returns the host that all episodes of an environment with the same options in this event loop share. Raises `UserError` if the host's
    Python environment is missing, ambiguous or not built, or if a secret in the options cannot be read. Raises `TaskError` if the
    environment has no host, or if the run would use more than `MAX_HOSTS` hosts."""
    kind, here = environment_kind(spec.ref), _hosts.setdefault(asyncio.get_running_loop(), {})
    if kind is None or not kind.host:
        raise TaskError(f"environment {spec.ref!r} has no host", fix="use rollout.agent=turns for it")
    key = repr((spec.ref, spec.options))
    if key not in here:
        if len(here) >= MAX_HOSTS:
            raise TaskError(f"the tasks of this run use more than {MAX_HOSTS} hosts", fix="use fewer environments or options")
        start: HostSpec = resolve(kind.host)(spec)
        here[key] = Host(start)
    return here[key]


def as_object(result: Any, host: Host) -> Mapping[str, Any]:
    """Returns the result of `play`. Raises `InfrastructureError` if the result is not a JSON object."""
    if not isinstance(result, Mapping):
        raise InfrastructureError(f"{host.spec.name}: its host returned a {type(result).__name__} instead of an object")
    return result


def score_of(result: Mapping[str, Any]) -> Score:
    """Converts a host's result to a score. If the result is invalid, the score has no value; it is never 0."""
    try:
        parts = result.get("parts") or {}
        if len(parts) > MAX_PARTS:
            raise ValueError(f"{len(parts)} parts; the maximum is {MAX_PARTS}")
        numbers = {str(name)[:200]: _number(value, f"part {str(name)[:80]!a}") for name, value in parts.items()}
        evidence = str(result.get("evidence") or "")[:MAX_EVIDENCE]
        if result.get("value") is None:
            blame = next((kind for kind in Blame if kind.value == result.get("blame") and kind is not Blame.POLICY), None)
            reason = str(result.get("reason") or "the environment returned no score")[:2000]
            return Score(value=None, reason=reason, parts=numbers, evidence=evidence, blame=blame)
        return Score(value=_number(result["value"], "the value"), parts=numbers, evidence=evidence)
    except (ValueError, TypeError, AttributeError) as error:
        return Score(value=None, reason=f"the environment's score is not valid: {describe_error(error, 500)}", blame=Blame.INFRASTRUCTURE)


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e300:
        raise ValueError(f"{what} must be a finite number, got {str(value)[:80]!a}")
    return float(value)


async def _serve(episode: LiveEpisode, method: str, params: Mapping[str, Any]) -> Any:
    """Runs a program for the host in the episode's sandbox. The program's running time counts as the agent's time."""
    sandbox = await episode.sandbox()
    with episode.running(sandbox):
        return await run_in(sandbox, method, params, limit_s=episode.task.limits.wall_s)


async def run_in(sandbox: Sandbox, method: str, params: Mapping[str, Any], *, limit_s: float) -> Any:
    """Serves an `exec` request, which has `argv`, `stdin` in base64, `timeout_s` (at most `limit_s`), `output_bytes` (at most `MAX_OUTPUT`)
    and `env`. A request with any other method raises `ValueError`."""
    if method != "exec":
        raise ValueError(f"unknown operation {method[:80]!a}")
    result = await sandbox.exec(
        params["argv"],
        stdin=base64.b64decode(params["stdin"]),
        timeout_s=min(float(params["timeout_s"]), limit_s),
        output_bytes=min(int(params["output_bytes"]), MAX_OUTPUT),
        env=params.get("env") or None,
    )
    return {name: getattr(result, name) for name in ("exit_code", "stdout", "stderr", "truncated", "reason")}
