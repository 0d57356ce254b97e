"""Sessions at Open Reward Standard (ORS) servers, over HTTP and server-sent events: https://openrewardstandard.io.

Packages: ors-sdk 0.1, openreward 0.1. Each tool call returns its output, a reward and whether the episode is finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from agentrl.base.user_code import clean
from agentrl.environment.remote import Session, schemas_of
from agentrl.environment.remote_http import Rejected, need, read_json
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault, TaskError
from agentrl.records import Observation, Step, ToolCall

_LONGEST_ID = 200


class OrsSession(Session):
    """A session on an ORS server. Options: `split` and `index` identify the task, and `environment` selects one of the server's
    environments."""

    _id = ""
    _created = False
    _final: Mapping[str, Any] | None = None  # the tool that receives an answer without a tool call

    async def open(self) -> None:
        """See `Session.open`."""
        if unknown := sorted(set(self.options) - {"split", "index", "environment"}):
            raise PluginError(f"tasks.family.options.{unknown[0]}: unknown option of an ORS server", fix="remove it")
        http, where = self.server.http, self.server.what
        name = self.options.get("environment") or await self._first_environment()
        self._path = f"/{quote(str(name), safe='')}"
        self._id, _ = await http.event_data("/create_session", {})
        if not 0 < len(self._id) <= _LONGEST_ID or not self._id.isascii() or not self._id.isprintable():
            raise EnvironmentFault(f"{where} returned an invalid session id")
        task = {"env_name": name, "split": self.options.get("split", "train"), "index": self.options.get("index", 0)}
        self._created = True
        try:
            await http.json("POST", "/create", task, headers=self._headers)
        except Rejected as error:
            raise TaskError(f"task {task['index']} of split {task['split']!r}: {error}", fix="correct the split, or the server") from None
        listed = await self._tools()
        self.actions = schemas_of(self.server, listed.get("tools"))
        final = listed.get("terminal_tool")
        self._final = final if isinstance(final, dict) else None
        self.takes_text = self._final is not None
        self.server.pin(f"the tools of task {task['index']} of split {task['split']!r}", [self.actions, final])

    async def reset(self) -> Observation:
        """See `Session.reset`."""
        blocks = await self.server.http.json("GET", f"{self._path}/prompt", headers=self._headers)
        return Observation(text=_text(blocks, self.server.what))

    async def step(self, action: str | ToolCall) -> Step:
        """See `Session.step`."""
        try:
            _, content = await self.server.http.event_data(f"{self._path}/call", self._call(action), headers=self._headers)
        except Rejected as error:
            if error.status in (404, 410):
                raise EnvironmentFault(f"{self.server.what} ended the session: {error.text}") from None
            raise PolicyFault(error.text) from None
        where = f"a result of {self.server.what}"
        result = need(read_json(content, self.server.what), dict, where)
        if result.get("ok") is not True:
            raise PolicyFault(clean(result.get("error"), 1000) or "the tool failed")
        output = need(result.get("output"), dict, where)
        return self.result(_text(output.get("blocks"), self.server.what), output.get("reward"), terminated=output.get("finished", False))

    async def keep_alive(self) -> None:
        """Sends a ping, because the server ends a session after 15 minutes without a request."""
        await self.server.http.request("POST", "/ping", headers=self._headers)

    async def close(self) -> bool:
        """Deletes the session if it was created. Returns True."""
        if self._created:
            for path in ("/delete", "/delete_session"):
                await self.server.http.request("POST", path, headers=self._headers)
        return True

    @property
    def _headers(self) -> dict[str, str]:
        return {"x-session-id": self._id}

    async def _first_environment(self) -> str:
        if "environment" not in self.server.cache:
            names = need(await self.server.http.json("GET", "/list_environments"), list, "/list_environments")
            self.server.cache["environment"] = need(names[0] if names else None, str, "the name of the server's first environment")
        return str(self.server.cache["environment"])

    async def _tools(self) -> dict[str, Any]:
        try:
            listed = await self.server.http.json("GET", f"{self._path}/task_tools", headers=self._headers)
        except Rejected as error:
            if error.status != 404:
                raise
            listed = await self.server.http.json("GET", f"{self._path}/tools", headers=self._headers)  # it has no tools for single tasks
        return dict(need(listed, dict, f"the tools of {self.server.what}"))

    def _call(self, action: str | ToolCall) -> dict[str, Any]:
        if isinstance(action, ToolCall):
            return {"name": action.name, "input": dict(action.arguments)}
        if self._final is None:
            raise PolicyFault("call one of the tools")
        argument = self._final.get("arg")
        return {"name": self._final.get("name"), "input": {argument: action} if isinstance(argument, str) else {}}


def _text(blocks: Any, where: str) -> str:
    """Returns the text of a list of blocks. Blocks without text, such as images, are replaced by a description."""
    parts = []
    for block in need(blocks, list, f"blocks of {where}"):
        block = need(block, dict, f"a block of {where}")
        if block.get("type") == "text":
            parts.append(need(block.get("text"), str, f"the text of a block of {where}"))
        else:
            data = block.get("data")
            size = len(data) * 3 // 4 if isinstance(data, str) else 0
            parts.append(f"({clean(block.get('mimeType') or block.get('type'), 60)}, {size} bytes, which cannot be shown)")
    return "\n".join(parts)
