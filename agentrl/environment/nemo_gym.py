"""Sessions at NeMo Gym resources servers, over HTTP: https://github.com/NVIDIA-NeMo/Gym, version 0.7.

There are two protocols. In `tools`, a row of the data set starts a session, each tool call is a request, and `/verify` scores the
conversation after an answer without a tool call. In `gymnasium`, `/reset` and `/step` return observations and rewards. In both protocols, a
cookie identifies the session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrl.base.user_code import clean
from agentrl.environment.remote import Session, number
from agentrl.environment.remote_http import Rejected, need, read_json
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault, TaskError
from agentrl.records import Blame, Observation, Step, ToolCall

FAILURE_KINDS: dict[str, Blame] = {
    **dict.fromkeys(
        (
            *("transport_unreachable", "transport_peer_drop", "transport_timeout", "transport_local_resource"),
            *("agent_run_error", "agent_request_failed", "agent_timeout", "judge_failed", "judge_unparseable"),
            *("provider_unavailable", "provider_quota_exhausted", "provider_oom_killed"),
            *("session_lost", "session_expired", "session_release_failed", "cancelled", "kill_shaped", "shutdown"),
            *("persistence_failed", "cohort_incomplete"),
        ),
        Blame.INFRASTRUCTURE,
    ),
    "verifier_error": Blame.TASK,
    "agent_command_not_allowed": Blame.POLICY,
}
"""Maps the `failure_kind` of a masked sample (`nemo_gym.failure_kinds`) to the blame. Failures that are the policy's fault are scored. A
kind that is not listed is blamed on the infrastructure."""
_RESERVED = frozenset({"verify", "seed_session", "close_session", "aggregate_metrics", "mcp", "reset", "step", "close", "reverify_mode"})


class NemoGymSession(Session):
    """A session on a NeMo Gym server. Options: `row`, the task's row in the data set, and `protocol`, which is `tools` or `gymnasium`."""

    takes_text = True
    _explicit_close = False

    async def open(self) -> None:
        """See `Session.open`."""
        if unknown := sorted(set(self.options) - {"row", "protocol"}):
            raise PluginError(f"tasks.family.options.{unknown[0]}: unknown option of a NeMo Gym server", fix="remove it")
        if (protocol := self.options.get("protocol", "tools")) not in ("tools", "gymnasium"):
            message = f"tasks.family.options.protocol: {protocol!r} is not a protocol of a NeMo Gym server"
            raise PluginError(message, fix="use tools or gymnasium")
        self._row: dict[str, Any] = dict(self.options.get("row") or {})
        self._parameters = self._row.get("responses_create_params") or {}
        self._gymnasium = protocol == "gymnasium"
        self._cookies: dict[str, str] = {}
        self._output: list[dict[str, Any]] = []  # the conversation so far, as items of the Responses API
        tools = self._parameters.get("tools") or []
        self.actions = [_schema(tool) for tool in tools] or None
        if not self._gymnasium:
            await self._post("/seed_session", self._row)

    async def reset(self) -> Observation:
        """See `Session.reset`."""
        if not self._gymnasium:
            return Observation(text="")
        answer = need(read_json(await self._post("/reset", self._row), self.server.what), dict, "/reset")
        info = answer.get("info")
        self._explicit_close = isinstance(info, dict) and info.get("supports_explicit_close") is True
        return Observation(text=answer.get("observation") or "")

    async def step(self, action: str | ToolCall) -> Step:
        """See `Session.step`."""
        item = self._item(action)
        if self._gymnasium:
            return await self._gymnasium_step(item)
        if isinstance(action, ToolCall) and action.name in _RESERVED:
            raise PolicyFault(f"there is no tool {action.name}")
        self._output.append(item)
        if isinstance(action, str):
            return await self._verified()
        try:
            output = (await self._post(f"/{action.name}", dict(action.arguments))).decode(errors="replace")
        except Rejected as error:
            output = error.text
        self._output.append({"type": "function_call_output", "call_id": item["call_id"], "output": output})
        return Step(observation=Observation(text=output))

    async def close(self) -> bool:
        """Ends the session if the server reports that it can end sessions. Other servers free the session after the last step, or keep
        it. Returns True in both cases."""
        if self._explicit_close:
            await self._post("/close", {})
        return True

    async def _gymnasium_step(self, item: Mapping[str, Any]) -> Step:
        answer = read_json(await self._post("/step", {**self._row, "response": self._response([item])}), self.server.what)
        answer = need(answer, dict, "/step")
        info = answer.get("info")
        outputs: Any = info.get("tool_outputs") if isinstance(info, dict) else None
        outputs = outputs if isinstance(outputs, list) else []
        texts = [output["output"] for output in outputs if isinstance(output, dict) and isinstance(output.get("output"), str)]
        texts += [answer["observation"]] if isinstance(answer.get("observation"), str) else []
        truncated = need(answer.get("truncated", False), bool, "truncated of /step")
        terminated = need(answer.get("terminated", False), bool, "terminated of /step")
        self._explicit_close = self._explicit_close and not (terminated or truncated)
        return self.result("\n".join(texts), answer.get("reward"), terminated=terminated, truncated=truncated)

    async def _verified(self) -> Step:
        """Requests the score of the conversation from the server and returns it in the last step."""
        data = {**self._row, "response": self._response(self._output)}
        answer = need(read_json(await self._post("/verify", data), self.server.what), dict, "/verify")
        kind, reason = clean(answer.get("failure_kind"), 80), clean(answer.get("failure_reason"), 500)
        blame = FAILURE_KINDS.get(kind, Blame.INFRASTRUCTURE)
        if answer.get("mask_sample") is True and blame is not Blame.POLICY:
            message = f"{self.server.what} returned no valid score: {kind or 'masked'}: {reason}"
            raise TaskError(message, fix="repair the verifier of the server") if blame is Blame.TASK else EnvironmentFault(message)
        components = answer.get("reward_components")
        parts = {str(name)[:80]: number(value, f"the reward {str(name)[:80]}") for name, value in _items(components)}
        return self.result("", answer.get("reward"), terminated=True, parts=parts)

    async def _post(self, path: str, data: Any) -> bytes:
        cookie = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        answer = await self.server.http.request("POST", path, data, headers={"cookie": cookie} if cookie else {})
        self._cookies |= {name: value for name, value in answer.cookies.items() if name in self._cookies or len(self._cookies) < 16}
        return answer.content

    def _item(self, action: str | ToolCall) -> dict[str, Any]:
        """Returns an action as an item of the Responses API."""
        name = f"{len(self._output)}"
        if isinstance(action, ToolCall):
            arguments = json.dumps(dict(action.arguments), ensure_ascii=False)
            return {"type": "function_call", "id": f"fc_{name}", "call_id": f"call_{name}", "name": action.name, "arguments": arguments}
        content = [{"type": "output_text", "text": action, "annotations": []}]
        return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": content}

    def _response(self, output: Any) -> dict[str, Any]:
        return {
            "id": f"resp_{self.spec.seed}",
            "created_at": 0,
            "model": "policy",
            "object": "response",
            "output": list(output),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": list(self._parameters.get("tools") or []),
        }


def _schema(tool: Any) -> dict[str, Any]:
    """Returns the function schema for a Responses API tool. Raises `TaskError` if the tool is not a function with a name."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise TaskError("a tool in the row is not a function with a name", fix="correct responses_create_params.tools")
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or tool["name"], "parameters": parameters}
    return {"type": "function", "function": function}


def _items(components: Any) -> list[tuple[Any, Any]]:
    return list(components.items())[:64] if isinstance(components, dict) else []
