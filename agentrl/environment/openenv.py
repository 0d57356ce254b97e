"""Sessions at OpenEnv servers, over WebSocket: https://github.com/meta-pytorch/OpenEnv, version 0.10.

A request is `{"type": "reset" | "step" | "close", "data": ...}`, and its response is `{"type": "observation" | "error", "data": ...}`.
Messages have no ids, so a session has at most one request in progress. A response that was not requested ends the session, and so does a
request without a response.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl.base import web
from agentrl.base.user_code import clean, describe_error
from agentrl.environment.remote import Session, schemas_of
from agentrl.environment.remote_http import MAX_BYTES, Busy, is_local, need, read_json
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault
from agentrl.records import Observation, Step, ToolCall

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_MOST_CHOICES = 64
TOOL = "act"
"""Name of the tool for actions that are neither text nor one of a few values."""


class OpenEnvSession(Session):
    """A session on an OpenEnv server. Options:

    - `actions`: "text" if the agent's answer is the value of the action's only text field, "tool" if an action is a call of the tool `act`.
      The default is the first of these that fits the server: the environment's own tools, a choice of a few values, text, `act`.
    - `reset`: additional parameters for the reset.
    - `split`, `index`: identify the task, if the server has tasks.
    """

    _socket: ClientConnection | None = None
    _field = ""
    _values: Mapping[str, Any] = {}
    _own_tools = _begun = False
    _first = ""

    async def open(self) -> None:
        """See `Session.open`."""
        if unknown := sorted(set(self.options) - {"actions", "reset", "split", "index"}):
            raise PluginError(f"tasks.family.options.{unknown[0]}: unknown option of an OpenEnv server", fix="remove it")
        async with self.server.learning:
            if "schema" not in self.server.cache:
                about = await self.server.http.json("GET", "/metadata")
                self.server.cache["instructions"] = clean(need(about, dict, "/metadata").get("description"), 4000)
                self.server.cache["schema"] = await self._action_schema()
        self.instructions = self.server.cache["instructions"]
        await self._connect()
        task_options = {name: self.options[name] for name in ("split", "index") if name in self.options}
        data = {"seed": self.spec.seed, **task_options, **dict(self.options.get("reset", {}))}
        self._first = _text(await self._request("reset", data))  # a full server reports this in its response to the first message
        properties = self.server.cache["schema"]["properties"]
        if not set(properties) - {"type", "tool_name", "arguments"}:  # actions have no fields other than those of the protocol
            try:
                listed = await self._request("step", {"type": "list_tools"})
            except PolicyFault as error:  # not an action of the policy
                raise EnvironmentFault(f"{self.server.what} lists no tools: {error}") from None
            self.actions, self._own_tools = schemas_of(self.server, _observation(listed).get("tools")), True
            self.server.pin("its tools", self.actions)
        else:
            self._choose_actions(self.server.cache["schema"])

    async def reset(self) -> Observation:
        """See `Session.reset`."""
        return Observation(text=self._first)

    async def step(self, action: str | ToolCall) -> Step:
        """See `Session.step`."""
        data = await self._request("step", self._action(action))
        observation, about = _observation(data), data.get("metadata") or {}
        error = observation.get("error")
        if isinstance(error, dict) and error.get("error_type") in ("transport_error", "timeout"):
            raise EnvironmentFault(f"{self.server.what}: a tool failed: {clean(error.get('message'), 500)}")
        truncated = observation.get("truncated") is True or (isinstance(about, dict) and about.get("truncated") is True)
        done = need(data.get("done", False), bool, f"done of {self.server.what}")
        return self.result(_text(data), data.get("reward"), terminated=done and not truncated, truncated=truncated)

    async def close(self) -> bool:
        """Asks the server to end the session, and waits until it closes the connection. Returns whether the server closed the connection;
        False if there is no connection or a request is in progress."""
        from websockets.exceptions import ConcurrencyError, ConnectionClosed

        if self._socket is None:
            return False
        try:
            await self._socket.send('{"type": "close"}')
            while True:
                await self._socket.recv()
        except ConnectionClosed as closed:
            return closed.rcvd is not None
        except ConcurrencyError:  # reading here would consume the response to the request in progress
            return False

    def abort(self) -> None:
        """Drops the connection."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.transport.abort()

    async def _connect(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException

        class Connect(connect):
            """A connection that does not follow redirects."""

            def process_redirect(self, exc: Exception) -> Exception | str:
                """Returns the redirect as an error."""
                return exc

        url = "ws" + self.server.url.removeprefix("http") + "/ws"
        try:
            self._socket = await Connect(
                url,
                additional_headers=self.server.headers,
                compression=None,
                max_size=MAX_BYTES,
                max_queue=4,
                ping_interval=None,  # a server does not answer pings while it computes a step
                open_timeout=None,
                proxy=None if is_local(url) else True,
                ssl=web.certificates() if url.startswith("wss:") else None,
            )
        except InvalidStatus as error:
            status = error.response.status_code
            if status == 503 or status == 429:
                raise Busy(f"{self.server.what} answered /ws with status {status}") from error
            raise EnvironmentFault(f"{self.server.what} answered /ws with status {status}; redirects are not followed") from error
        except (WebSocketException, OSError) as error:
            raise Busy(f"{self.server.what} did not accept a connection: {describe_error(error)}") from error

    async def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request and returns the data of the observation in the response. Drops the connection if there is no response."""
        from websockets.exceptions import WebSocketException

        socket = self._socket
        if socket is None:
            raise EnvironmentFault(f"{self.server.what} has closed the connection")
        try:
            content = await self._exchange(socket, json.dumps({"type": kind, "data": data}))
        except WebSocketException as error:
            self.abort()
            raise EnvironmentFault(f"{self.server.what} ended the session: {describe_error(error)}") from error
        except BaseException:  # messages have no ids, so a late response would be mistaken for the response to the next request
            self.abort()
            raise
        answer = need(read_json(content, self.server.what), dict, f"an answer of {self.server.what}")
        result: dict[str, Any] = need(answer.get("data"), dict, f"data of {self.server.what}")
        if answer.get("type") == "error":
            raise await self._error(kind, result)
        if answer.get("type") != "observation":
            raise EnvironmentFault(f"{self.server.what} answered a {kind} with {clean(answer.get('type'), 40)!r}, not an observation")
        return result

    async def _exchange(self, socket: ClientConnection, message: str) -> bytes:
        """Sends a message and returns the server's next message. A server that rejects the session reports the rejection before it receives
        the first message."""
        from websockets.exceptions import ConnectionClosed

        first, self._begun = not self._begun, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                early = await socket.recv(decode=False)
                if first and b'"error"' in early[:200]:
                    return early
                raise EnvironmentFault(f"{self.server.what} sent a response that was not requested")
        try:
            await socket.send(message)
        except ConnectionClosed:  # a full server may have reported this and closed the connection after the check above
            if not first:
                raise
        parts, size = [], 0
        async for part in socket.recv_streaming(decode=False):
            parts.append(part)
            size += len(part)
            if len(parts) > 4096 + size // 64:
                raise EnvironmentFault(f"{self.server.what} sent a response in more than {len(parts)} pieces")
        return b"".join(parts)

    async def _error(self, kind: str, content: Mapping[str, Any]) -> Exception:
        """Returns the exception for an error that the server reports."""
        code, text = clean(content.get("code"), 40), clean(content.get("message"), 500)
        if code == "CAPACITY_REACHED":
            most = content.get("max_sessions")
            return Busy(f"{self.server.what}: {text}", most=most if type(most) is int else None)
        if code == "VALIDATION_ERROR" and kind == "step":
            if await self._action_schema() != self.server.cache["schema"]:
                return EnvironmentFault(f"{self.server.what} changed the schema of its actions during the run")
            errors = content.get("errors")
            errors = errors[:8] if isinstance(errors, list) else []
            problems = [f"{_path(problem)}: {clean(problem.get('msg'), 200)}" for problem in errors if isinstance(problem, dict)]
            return PolicyFault("; ".join(problems) or text or "an invalid action")
        return EnvironmentFault(f"{self.server.what}: {code}: {text}")

    async def _action_schema(self) -> dict[str, Any]:
        """Requests the server's action schema and returns it without the field `metadata`, which is not intended for agents."""
        schema = need(await self.server.http.json("GET", "/schema"), dict, "/schema").get("action")
        schema = dict(need(schema, dict, f"the schema of actions of {self.server.what}"))
        properties = need(schema.get("properties", {}), dict, f"properties of {self.server.what}")
        need(schema.get("$defs", {}), dict, f"$defs of {self.server.what}")
        for name in need(schema.get("required", []), list, f"required of {self.server.what}"):
            need(name, str, f"a required field of {self.server.what}")
        return {**schema, "properties": {name: item for name, item in properties.items() if name != "metadata"}}

    def _choose_actions(self, schema: Mapping[str, Any]) -> None:
        """Sets `actions` from the action schema."""
        properties, wanted = schema["properties"], self.options.get("actions")
        if wanted not in (None, "text", "tool"):
            raise PluginError(
                f"tasks.family.options.actions must be text or tool, got {wanted!r}", fix="set it to text or tool, or remove it"
            )
        needed = [name for name in schema.get("required", []) if name in properties] or list(properties)
        self._field = needed[0] if len(needed) == 1 else ""
        if self._field and wanted is None:
            self._values = _choices(properties[self._field], schema)
            self.actions = list(self._values) or None
        is_text = bool(self._field) and _resolved(properties[self._field], schema).get("type") == "string"
        if wanted == "text" and not is_text:
            raise PluginError("tasks.family.options.actions=text: an action of this server has no single text field", fix="remove it")
        if wanted == "tool" or (not is_text and not self._values):
            self._field = ""
            description = clean(schema.get("description"), 4000) or "Acts in the environment."
            entry = {"name": TOOL, "description": description, "parameters": {**schema, "type": "object"}}
            self.actions = schemas_of(self.server, [entry])

    def _action(self, action: str | ToolCall) -> dict[str, Any]:
        """Returns the data of the request for a step with this action."""
        if isinstance(action, ToolCall):
            if self._own_tools:
                return {"type": "call_tool", "tool_name": action.name, "arguments": dict(action.arguments)}
            return dict(action.arguments)
        if not self._field:
            raise PolicyFault("call one of the tools")
        if not self._values:
            return {self._field: action}
        if action not in self._values:
            raise PolicyFault(f"an action is one of: {', '.join(self._values)}")
        return {self._field: self._values[action]}


def _resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the definition in `root` to which a schema refers, or the schema if it refers to none. Follows only one reference."""
    schema = schema if isinstance(schema, dict) else {}
    options = schema.get("allOf")
    reference = (options[0] if isinstance(options, list) and options and isinstance(options[0], dict) else schema).get("$ref")
    definition = root.get("$defs", {}).get(str(reference).removeprefix("#/$defs/")) if reference else None
    return definition if isinstance(definition, dict) else schema


def _choices(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns text -> value for the values that a schema allows; empty unless these are 2 to `_MOST_CHOICES` strings, integers or
    booleans."""
    schema = _resolved(schema, root)
    values = schema.get("enum")
    if values is None and schema.get("type") == "boolean":
        values = [False, True]
    low, high = schema.get("minimum"), schema.get("maximum")
    if values is None and schema.get("type") == "integer" and type(low) is int and type(high) is int and 0 < high - low < _MOST_CHOICES:
        values = list(range(low, high + 1))
    if not isinstance(values, list) or not 1 < len(values) <= _MOST_CHOICES or not all(isinstance(value, str | int) for value in values):
        return {}
    texts = {value if isinstance(value, str) else json.dumps(value): value for value in values}
    return texts if len(texts) == len(values) and all(texts) else {}


def _observation(data: Mapping[str, Any]) -> dict[str, Any]:
    return dict(need(data.get("observation"), dict, "an observation"))


def _text(data: Mapping[str, Any]) -> str:
    """Returns the text of an observation: the result or the error of a tool, the observation's only field if that is text, or JSON.

    The field `metadata` is used only if there is no other field.
    """
    observation = _observation(data)
    result, error = observation.get("result"), observation.get("error")
    if "tool_name" in observation and "result" in observation:
        if isinstance(error, dict):
            return f"error: {error.get('message')}"
        blocks = result.get("content") if isinstance(result, dict) else None
        texts = [str(block.get("text", "")) for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
        return "\n".join(texts) if texts else result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    shown = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
    shown = shown or need(observation.get("metadata") or {}, dict, "metadata of an observation")
    values = list(shown.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(shown, ensure_ascii=False)


def _path(problem: Mapping[str, Any]) -> str:
    location = problem.get("loc")
    return clean(".".join(map(str, location)) if isinstance(location, list) else str(location), 80)
