"""Tools with state: methods of a user-supplied class, whose object belongs to one episode."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

from agentrl.agent.typed import TypedTool, is_tool, run, typed_tool
from agentrl.base import user_code
from agentrl.errors import PluginError
from agentrl.records.fields import json_value


class ToolInstance:
    """An episode's object of a class with `tool` methods, opened by the first call, with the saved state if there is one.

    A dataclass's state is its fields. Other classes define `state()`, which returns JSON data, and `restore(state)`, which is called on a
    new object. An optional `close()` is called at the end of the episode. All three may be async.
    """

    def __init__(self, kind: Any, saved: Any = None, *, restored: bool = False) -> None:
        self.kind = kind
        self._saved = saved
        self._restored = restored  # whether `_saved` is a state
        self._object: Any = None
        self._opening = asyncio.Lock()

    @property
    def used(self) -> bool:
        """Whether there is a state to save."""
        return self._restored or self._object is not None

    async def open(self) -> Any:
        """Returns the object, which the first call creates."""
        async with self._opening:  # concurrent calls share one object
            if self._object is None:
                self._object = await (self._reopened() if self._restored else self._new())
            return self._object

    async def _new(self) -> Any:
        return await user_code.run_in_thread(self.kind, what=f"opening {self.kind.__name__}")

    async def _reopened(self) -> Any:
        if not hasattr(self.kind, "restore"):
            return _fields_of(self.kind).validate_python(json_value(self._saved))
        new = await self._new()
        await run(lambda: new.restore(json_value(self._saved)), new.restore, what=f"restoring {self.kind.__name__}")
        return new

    async def state(self, *, timeout_s: float) -> Any:
        """Returns the state as JSON data. Raises `ValueError` if it cannot be captured."""
        if self._object is None:
            return self._saved
        what = f"the state of {self.kind.__name__}"

        async def captured() -> Any:
            if hasattr(self.kind, "state"):
                return await run(self._object.state, self._object.state, what=what)
            return _fields_of(self.kind).dump_python(self._object, mode="json", warnings="error")

        with user_code.fault_boundary() as fault:
            return json_value(await user_code.call_user_code(captured, what=what, timeout_s=timeout_s))
        assert fault.error is not None
        user_code.log_unexpected(what, fault.error)
        raise ValueError(f"{what} cannot be captured: {user_code.describe_error(fault.error)}") from fault.error

    async def close(self, *, timeout_s: float) -> None:
        """Closes the object. Logs errors."""
        closing, self._object = self._object, None
        if not hasattr(closing, "close"):
            return
        what = f"closing {self.kind.__name__}"
        with user_code.logging_faults(what):
            await user_code.call_user_code(lambda: run(closing.close, closing.close, what=what), what=what, timeout_s=timeout_s)


def marked_functions(kind: Any) -> list[Any]:
    """Returns the attributes of a class that are functions under `tool`, inside `staticmethod` or `classmethod` too."""
    attributes = (inspect.getattr_static(kind, name, None) for name in dir(kind))
    functions = (item.__func__ if isinstance(item, staticmethod | classmethod) else item for item in attributes)
    return [function for function in functions if is_tool(function)]


@lru_cache(maxsize=1024)
def tool_methods(kind: Any) -> tuple[TypedTool, ...]:
    """Returns the tools of a class. Raises `PluginError` if its state cannot be captured, or it cannot be opened."""
    if not (marked := marked_functions(kind)):
        return ()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(each.default is each.empty and each.kind not in variadic for each in inspect.signature(kind).parameters.values()):
        raise PluginError(f"the tools of {kind.__name__} cannot be opened: it takes arguments", fix="give each a default")
    own = [name for name in ("state", "restore") if callable(getattr(kind, name, None))]
    if len(own) == 1 or not (own or dataclasses.is_dataclass(kind)):
        missing = "restore()" if own == ["state"] else "state()" if own else "state() and restore()"
        raise PluginError(
            f"the tools of {kind.__name__} have a state that cannot be captured: it has no {missing}",
            fix="make it a dataclass of JSON data, or define state(), which returns JSON data, and restore(state)",
        )
    if not own:
        _fields_of(kind)
    for function in marked:
        if not inspect.isfunction(inspect.getattr_static(kind, function.__name__, None)):
            raise PluginError(f"the tool {function.__name__} of {kind.__name__} is not a plain method", fix="use self, and only @tool")
    methods = tuple(typed_tool(function, method=True) for function in marked)
    return tuple(sorted(methods, key=lambda method: method.function.__code__.co_firstlineno))


@lru_cache(maxsize=1024)
def _fields_of(kind: Any) -> TypeAdapter[Any]:
    """The adapter that reads and writes a dataclass as JSON data."""
    try:
        return TypeAdapter(kind)
    except Exception as error:
        reason = user_code.describe_error(error)
        raise PluginError(
            f"the tools of {kind.__name__} have a state that JSON cannot represent ({reason})", fix="or define state() and restore()"
        ) from None
