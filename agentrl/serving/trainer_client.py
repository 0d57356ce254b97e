"""The learner's client of the inference server during an NCCL transfer: vLLM's own, with the server's key, which waits for the pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from agentrl.serving.access import auth_headers as access

_POLL_S = 0.005


class PausedServerClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]  # vLLM's types are not followed
    """Starts an update only while the controller holds the server paused, and names the new version at its end.

    Give it to `NCCLTrainerWeightTransferEngine` and set `version` before each `send_weights()`.
    """

    def __init__(self, base_url: str, *, key: str, timeout_s: float, waiting: Callable[[], None] = lambda: None) -> None:
        """`waiting`: called at each check whether the server is paused."""
        super().__init__(base_url, timeout=timeout_s)
        self._headers = access(key)
        self.version = 0
        self._waiting = waiting

    def start_weight_update(self) -> None:
        """Waits for the pause, then starts. Raises `TimeoutError` when the controller does not pause the server in time."""
        deadline = time.monotonic() + self.timeout
        with self._client() as http:
            while not http.get("/is_paused").raise_for_status().json()["is_paused"]:
                self._waiting()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the server was not paused for version {self.version} within {self.timeout:g} s")
                time.sleep(_POLL_S)
        super().start_weight_update()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        super().finish_weight_update(weight_version or str(self.version))

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        with self._client() as http:
            http.post(f"/{path}", json=json).raise_for_status()

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.base_url, headers=self._headers, timeout=self.timeout, trust_env=False)
