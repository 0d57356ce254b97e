"""Adapter for verifiers 0.4 tasksets. The verifiers class `Env` plays each episode in `verifiers_host.py`, with the gateway as its model.

A taskset without a harness uses `ChatHarness`, which runs in this process, because verifiers' default harness would run the policy's
commands on this machine.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from host_channel import INFRASTRUCTURE, TASK, Caller, Fault, describe_error
from load_hints import load_hint
from openai import AsyncOpenAI
from pydantic import BaseModel
from verifiers.v1.clients import EvalClient
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import PRIME_INFERENCE_HOST, BaseClientConfig, resolve_api_key
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import server as interception
from verifiers.v1.runtimes import subprocess as local_runtime
from verifiers.v1.utils import loaders
from verifiers.v1.utils.compile import validate_pairing
from verifiers_data import MAX_TEXT, described, finite
from verifiers_sandbox import CALLERS, serve_programs

__all__ = ["ChatHarness"]  # verifiers loads the harness from this module

LOCAL = "subprocess"
RUNTIMES = (LOCAL, "docker", "podman", "apptainer")
NO_KEY = "AGENTRL_POLICY"  # a variable that does not exist: the key of an episode comes from `PLAYING`
ENDS = ("context_length_exceeded", "turn_limit")  # error codes of the gateway after which no completion is possible
STOPS = {"max_turns": "turn_limit", "turn_limit": "turn_limit", "context_length_exceeded": "token_limit", "agent_timeout": "wall_limit"}

PLAYING: dict[str, tuple[str, Any]] = {}
"""Maps the id of a trace to the key of its episode and the trace."""


class Taskset:
    """A taskset of verifiers 0.4 and the environment that plays it. The constructor raises `Fault` if the package cannot be loaded or
    cannot run here."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._name, self._size, self._sandboxed = config["package"], config["size"], config["sandboxed"]
        raw = {**config["env"], "taskset": {**config["args"], "id": self._name}}
        try:
            kind = loaders.env_config_type(self._name, raw.get("id", ""))
            self._roles = [name for name, field in kind.model_fields.items() if isinstance(field.default, AgentConfig)]
            for role in self._roles:
                raw[role] = _role(kind.model_fields[role].default, dict(raw.get(role) or {}), config)
            self._env = loaders.load_environment(loaders.resolve_env_config(raw))
            self._task_class = type(self._env.taskset).task_type()
            self._check()
        except Fault:
            raise
        except BaseException as error:
            raise Fault(TASK, f"{self._name}: {describe_error(error)}{load_hint(error)}") from error

    def _check(self) -> None:
        """Raises `Fault` if the package needs something that is not available, or would run the policy's programs on this machine."""
        taskset = self._env.taskset
        tools = [*self._task_class.toolsets(taskset.config.task), *taskset.toolsets(taskset.config)]
        types = [getattr(getattr(tool.config, "runtime", None), "type", LOCAL) for tool in tools]
        if self._env._requires_tunnel({}) or not set(types) <= set(RUNTIMES):
            raise Fault(TASK, f"{self._name}: its tool servers need a hosted runtime; agentrl runs only {', '.join(RUNTIMES)}")
        for client in _clients(self._env.config):
            if PRIME_INFERENCE_HOST in client.base_url and resolve_api_key(client) == "EMPTY":
                model, key = getattr(client, "model", "a model"), client.api_key_var
                raise Fault(
                    TASK,
                    f"{self._name} has no key for {model} at {client.base_url}: set {key} with the option variables,"
                    " or set a different model in args or env",
                )
        if self._sandboxed:
            self._task_class.NEEDS_CONTAINER = False  # the sandbox is the container
        for role in self._roles:
            harness, runtime = self._env._harnesses[role], getattr(self._env.config, role).runtime
            if (harness.EXECUTES_CODE or harness.NEEDS_CONTAINER) and runtime.type == LOCAL:
                raise Fault(TASK, f"{self._name}: the harness of {role} needs a container: set the option runtime to docker")
            if self._task_class.NEEDS_CONTAINER and runtime.type == LOCAL:
                raise Fault(TASK, f"{self._name} needs a container: set the option image to use agentrl's sandboxes, or runtime to docker")
            if runtime.type == LOCAL and any(getattr(tool.config, "colocated", False) for tool in tools):
                raise Fault(TASK, f"{self._name}: its tool servers must run in its programs' container: set the option runtime to docker")
            validate_pairing(harness, self._task_class, runtime, tools=tools)

    def describe(self) -> list[dict[str, Any]]:
        """Returns the first `size` tasks. Raises `Fault` if the tasks cannot be loaded."""
        try:
            drawn = islice(iter(self._env.taskset), self._size)
            tasks: list[dict[str, Any]] = described(
                (f"{task.data.idx}", _text(task.data), task.data.model_dump(mode="json")) for task in drawn
            )
            return tasks
        except Fault:
            raise
        except BaseException as error:
            raise Fault(TASK, f"loading its tasks failed: {describe_error(error)}{load_hint(error)}") from error

    async def serve(self, ready: Callable[[], None]) -> None:
        """Provides the resources that episodes share. Runs until this task is cancelled."""
        serve_policy()
        serve_programs()
        with tempfile.TemporaryDirectory(prefix="agentrl-verifiers-") as folder:
            local_runtime.CACHE_DIR = Path(folder)  # for working directories, instead of the user's home
            async with self._env.serving():
                ready()
                await asyncio.Event().wait()

    async def play(self, params: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """Plays one episode and returns its score."""
        data = self._task_class.data_type().model_validate(json.loads(params["data"]["task"]))
        if self._sandboxed:
            data = data.model_copy(update={"image": None})  # the option `image` replaces it
        task = self._task_class(data, self._env.config.taskset.task)
        client = vf.EvalClientConfig(base_url=params["base_url"], api_key_var=NO_KEY)
        context = vf.ModelContext(model=params["model"], client=client)
        env = copy.copy(self._env)
        env.config = self._env.config.model_copy(update={role: self._bounded(role, params) for role in self._roles})
        traces: list[str] = []

        def opened(trace: Any) -> None:
            traces.append(trace.id)
            PLAYING[trace.id] = (params["key"], trace)
            CALLERS[trace.id] = caller

        try:
            return result_of(await env.run_episode(task, context, on_trace=opened), turns=params["turns"])
        finally:
            for trace in traces:
                PLAYING.pop(trace, None)
                CALLERS.pop(trace, None)

    def _bounded(self, role: str, params: dict[str, Any]) -> Any:
        """Returns the configuration of a role with the limits of an episode applied."""
        own, solve_s = getattr(self._env.config, role), params["solve_s"]
        most = {"setup": solve_s, "rollout": solve_s, "finalize": solve_s / 4, "scoring": solve_s / 4}
        timeout = own.timeout.model_copy(update={name: min(getattr(own.timeout, name) or limit, limit) for name, limit in most.items()})
        return own.model_copy(update={"max_turns": min(own.max_turns or params["turns"], params["turns"]), "timeout": timeout})


def _role(default: Any, wanted: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a role, with `ChatHarness` in place of verifiers' default harness. Raises `Fault` if the role
    requires a hosted runtime."""
    runtime = dict(wanted.get("runtime") or {})
    runtime.setdefault("type", config["runtime"] if default.runtime.type == "prime" else default.runtime.type)  # prime: verifiers' default
    if runtime["type"] not in RUNTIMES:
        message = f"{config['package']} requires the hosted runtime {runtime['type']!r}, but agentrl runs only {', '.join(RUNTIMES)}"
        raise Fault(TASK, message)
    if not wanted.get("harness") and default.harness is None and loaders.default_harness_id(config["package"]) == "bash":
        wanted["harness"] = {"id": __name__}
    return {**wanted, "runtime": runtime}


def _clients(config: Any) -> Iterator[Any]:
    """Yields the endpoints in a configuration, such as those of judges."""
    if isinstance(config, BaseClientConfig):
        yield config
    elif isinstance(config, BaseModel | list):
        for each in config if isinstance(config, list) else vars(config).values():
            yield from _clients(each)


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A harness that runs a conversation with the task's tools in this process."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any, **_: Any
    ) -> Any:
        """Samples until an answer has no tool calls. If the episode reaches a limit, sampling raises an error, and verifiers scores the
        episode."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        async with AsyncExitStack() as stack, AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            options = {"tools": tools} if tools else {}
            while True:
                done = await client.chat.completions.create(model=ctx.model, messages=messages, **options)
                message = done.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    content = await _result(call.function, dispatch, connected)
                    answer = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": content}
                    messages.append(bound_tool_message(answer))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _result(function: Any, dispatch: Any, connected: Any) -> Any:
    """Calls a tool of the task. Returns an error message for an invalid call, because that is the policy's mistake."""
    if function.name not in dispatch:
        return f"error: no tool {function.name!r}"
    try:
        arguments = json.loads(function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        return f"error: the arguments are not JSON: {describe_error(error)}"
    if not isinstance(arguments, dict):
        return "error: the arguments must be an object"
    return await call_mcp(connected, dispatch, function.name, arguments)


class PolicyClient(EvalClient):
    """Sends each request with the key of its episode. Stops an episode that has reached a limit, so that it does not count as failed."""

    def _headers(self, dialect: Any, incoming: Any, session_id: str | None) -> Any:
        headers = super()._headers(dialect, incoming, session_id)
        if session_id in PLAYING:
            headers.update(dialect.auth_headers(PLAYING[session_id][0]))
        return headers

    async def _request(self, url: str, body: Any, headers: Any, **options: Any) -> Any:
        try:
            return await super()._request(url, body, headers, **options)
        except ProviderError as error:
            ended = next((code for code in ENDS if code in str(error)), None)
            if ended is not None and headers.get(SESSION_ID_HEADER) in PLAYING:
                PLAYING[headers[SESSION_ID_HEADER]][1].stop(ended)
            raise


def serve_policy() -> None:
    """Registers `PolicyClient` in verifiers as the client of the policy."""
    other = interception.resolve_client
    interception.resolve_client = lambda config: PolicyClient(config) if config.api_key_var == NO_KEY else other(config)


def result_of(episode: Any, *, turns: int) -> dict[str, Any]:
    """Returns the score of an episode: the mean reward of its trainable traces. All rewards and metrics become parts of the score. If the
    episode failed, or a reward is missing or not finite, the value is None, and the result has a fault or a reason."""
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    parts: dict[str, float] = {}
    for trace in episode.traces:
        role = f"{trace.agent.name}." if len(episode.traces) > 1 else ""
        parts |= {f"{role}{name}": reward.value for name, reward in trace.rewards.items() if reward is not None}
        parts |= {f"{role}{name}": value for name, value in trace.metrics.items() if value is not None}
    result: dict[str, Any] = {"parts": finite(parts), "value": None, "stop": _stop(episode, turns)}
    if trained:
        result["answer"] = str(trained[-1].last_reply or "")[:MAX_TEXT]
    if (fault := _fault(episode, trained)) is not None:
        return {**result, "fault": fault}
    if any(not trace.rewards for trace in trained):
        return {**result, "reason": "the package defines no reward", "blame": TASK}
    rewards = [trace.reward for trace in trained]
    if missing := [name for trace in trained for name, reward in trace.rewards.items() if reward is None]:
        return {**result, "reason": f"the reward {missing[0]!r} was not computed in time", "blame": INFRASTRUCTURE}
    value = sum(rewards) / len(rewards)
    if not math.isfinite(value):
        return {**result, "reason": f"the reward is not finite: {rewards}", "blame": TASK}
    return {**result, "value": value}


def _fault(episode: Any, trained: list[Any]) -> dict[str, str] | None:
    """Returns the blame and the message if an episode failed; None otherwise."""
    errors = [*episode.errors, *(trace.errors[-1] for trace in episode.traces if not trace.ok and trace.errors)]
    if errors:
        error = errors[-1]
        blame = TASK if error.type in ("TaskError", "EnvError") else INFRASTRUCTURE
        return {"blame": blame, "message": f"{error.type}: {error.message}"}
    if not trained:
        return {"blame": TASK, "message": "the environment ran no trainable agent"}
    if others := [trace for trace in episode.traces if not trace.agent.trainable and trace.agent.config.client.api_key_var == NO_KEY]:
        name = others[0].agent.name
        return {"blame": TASK, "message": f"{name} is not trainable but uses the policy: give it a model with the option env.{name}.client"}
    return None


def _stop(episode: Any, turns: int) -> str:
    """Returns the limit that ended the episode; empty if none did. Reaching a package's own limit on turns counts as a normal end."""
    for trace in episode.traces:
        stop = trace.stop_condition
        if stop in STOPS and (stop != "max_turns" or trace.num_turns >= turns):
            return STOPS[stop]
    return ""


def _text(data: Any) -> str:
    return "\n\n".join(filter(None, (data.system_prompt, data.prompt_text)))
