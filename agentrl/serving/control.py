"""Calls vLLM's HTTP routes with typed arguments. Only this module converts HTTP errors to `ServingError`. Every call has a deadline.

The control routes need `VLLM_SERVER_DEV_MODE=1`. Every request carries the server's key (`agentrl.serving.access`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Mapping
from http import HTTPStatus
from json import dumps
from typing import Any, Literal

from pydantic_core import from_json

from agentrl.errors import RequestRefused, ServingError
from agentrl.serving.transport import HttpTransport

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 60.0
METRICS_TIMEOUT_S = 5.0
_GENERATE = "/inference/v1/generate"
_ABORT = "/inference/v1/abort_requests"
_REFUSED = (400, 413, 422)
_ENGINE_ID = "generate-tokens-"  # the server's prefix for request ids
_EXCERPT = 500
_METRICS_BYTES = 4_000_000
_METRIC = re.compile(r"^(vllm:[a-z0-9_]{1,80}(?<!_bucket))(?:\{[^\n]{0,2000}\})? ([0-9.eE+-]{1,32})$", re.MULTILINE)


class ControlPlane:
    """Calls to one server. An empty `key` means that the server needs no key. Use the client from only one event loop, and call `close` at
    the end. All methods except `close`, `health` and `abort` raise the errors of `request`.

    `max_connections` limits the number of concurrent requests; further requests wait.
    """

    def __init__(self, url: str, *, key: str = "", max_connections: int = 64) -> None:
        self.url = url
        self.paused = False  # from `pause` to `resume`
        self._wire = HttpTransport(url, key=key, max_connections=max_connections)

    async def close(self) -> None:
        """Closes all connections."""
        self._wire.close()

    async def request(self, method: Literal["GET", "POST"], path: str, *, timeout_s: float, json: Any = None, last: bool = False) -> Any:
        """Returns the decoded JSON of a response with status 200, or None if the response is empty.

        Raises `UnsentError` if the request was not sent, `RequestRefused` for status 400, 413 and 422, and `ServingError` for any other
        failure.

        `last`: whether this is the last request on its connection.
        """
        status, content = await self._answer(method, path, b"" if json is None else _encoded(json), timeout_s=timeout_s, last=last)
        return decode_answer(status, content, f"{self.url}{path}")

    async def _answer(self, method: str, path: str, body: bytes = b"", *, timeout_s: float, last: bool = False) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._wire.request(method, path, body, last=last)
        except TimeoutError:
            raise ServingError(f"no response from {self.url}{path} within {timeout_s:g} s") from None

    async def health(self, *, timeout_s: float) -> Literal["answers", "down", "silent"]:
        """Returns the server's state. `down`: no process listens, or the engine is dead. `silent`: no response within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.request("GET", "/health", timeout_s=2 * timeout_s)
        except TimeoutError:
            return "silent"
        except ServingError:
            return "down"
        return "answers"

    async def pause(self, *, abort: bool = False) -> None:
        """Pauses the engine between two steps. Requests in flight wait or, if `abort` is True, end with finish reason "abort"."""
        self.paused = True
        await self._control(f"/pause?mode={'abort' if abort else 'keep'}")

    async def resume(self) -> None:
        """Resumes the engine."""
        await self._control("/resume")
        self.paused = False

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Initializes the weight-transfer engine."""
        await self._control("/init_weight_transfer_engine", json={"init_info": dict(init_info)})

    async def start_weight_update(self) -> None:
        """Starts a weight update."""
        await self._control("/start_weight_update")

    async def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Loads weights."""
        await self._control("/update_weights", json={"update_info": dict(update_info)})

    async def finish_weight_update(self, version: int | None) -> None:
        """Finishes the update; later tokens carry `version`."""
        await self._control("/finish_weight_update", json={"weight_version": None if version is None else str(version)})

    async def set_version(self, version: int) -> None:
        """Sets the version of the serving weights without changing them."""
        await self._control("/update_weight_version", json={"new_version": str(version)})

    async def version(self) -> str:
        """Returns the version of the serving weights, or "default" until a version is set."""
        return parse_weight_version(await self.request("GET", "/weight_info", timeout_s=CONTROL_TIMEOUT_S))

    async def reload(self, folder: str, version: int) -> None:
        """Makes every worker load a Hugging Face folder. Loading a folder is slow, but independent of the weight-transfer backend."""
        await self._control("/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": folder}})
        await self.set_version(version)

    async def metrics(self) -> dict[str, float]:
        """Returns vLLM's counters and gauges by name, such as `vllm:kv_cache_usage_perc`, each with its maximum over labels."""
        status, content = await self._answer("GET", "/metrics", timeout_s=METRICS_TIMEOUT_S)
        if status != HTTPStatus.OK:
            raise ServingError(f"{self.url}/metrics returned status {status}")
        return parse_metrics(content[:_METRICS_BYTES].decode(errors="replace"))

    def generate(self, body: Mapping[str, Any], *, timeout_s: float) -> Awaitable[Any]:
        """Requests a completion of token ids; `body` is vLLM's `GenerateRequest`. Raises the same errors as `request`."""
        return self._generated(_encoded(body), timeout_s)  # keeps only bytes while thousands of requests wait

    async def abort(self, request_id: str) -> None:
        """Aborts a request of `generate`, which then returns the tokens sampled so far. Failures are only logged."""
        try:
            await self.request("POST", _ABORT, timeout_s=CONTROL_TIMEOUT_S, json={"request_ids": [f"{_ENGINE_ID}{request_id}"]})
        except ServingError as error:
            log.warning("request %s could not be aborted: %s", request_id, error)

    async def _generated(self, body: bytes, timeout_s: float) -> Any:
        status, content = await self._answer("POST", _GENERATE, body, timeout_s=timeout_s)
        return decode_answer(status, content, f"{self.url}{_GENERATE}")

    async def _control(self, path: str, *, json: Any = None) -> None:
        # After a status 500, the server closes the connection, and the next call must not receive it from the pool.
        await self.request("POST", path, timeout_s=CONTROL_TIMEOUT_S, json=json, last=True)


def decode_answer(status: int, content: bytes, where: str) -> Any:
    """Returns the decoded JSON of a response with status 200, or None if the response is empty. Otherwise, raises `ServingError`, or
    `RequestRefused` for status 400, 413 and 422."""
    if status != HTTPStatus.OK:
        raise (RequestRefused if status in _REFUSED else ServingError)(f"{where} returned status {status}: {_excerpt(content)}")
    if not content:
        return None
    try:
        return from_json(content)
    except ValueError as error:
        raise ServingError(f"{where} did not return JSON: {_excerpt(content)!r}") from error


def parse_metrics(text: str) -> dict[str, float]:
    """Parses vLLM's metrics in the Prometheus text format, without the buckets of histograms. Other lines are ignored."""
    metrics: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        with contextlib.suppress(ValueError):
            number = float(value)
            metrics[name] = max(metrics.get(name, number), number)
    return metrics


def _encoded(value: Any) -> bytes:
    return dumps(value, separators=(",", ":")).encode()


def _excerpt(content: bytes) -> str:
    return content[:_EXCERPT].decode(errors="replace")


def parse_weight_version(answer: Any) -> str:
    """Returns the version in a response from `/weight_info`. Raises `ServingError` if the response contains no version."""
    version = answer.get("weight_version") if isinstance(answer, dict) else None
    if not isinstance(version, str):
        raise ServingError(f"/weight_info returned no version: {str(answer)[:_EXCERPT]}")
    return version
