"""The learner's side of vLLM's NCCL weight transfer: sends full tensors from a DeepSpeed engine to the server's memory.

vLLM has no weight source for DeepSpeed. Under ZeRO-3, a parameter is empty until it is gathered, and gathering is a collective, so
every rank must iterate over the parameters in the order of `metadata()`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from agentrl.learner.engine import PolicyEngine
from agentrl.serving.access import auth_headers as access

_POLL_S = 0.005


class PausedServerClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]  # vLLM's types are not followed
    """vLLM's client with the server's key. The client starts an update only while the server is paused, and sets the version when the
    update is finished.

    Pass it to `NCCLTrainerWeightTransferEngine` and set `version` before each `send_weights()`.
    """

    def __init__(self, base_url: str, *, key: str, timeout_s: float, waiting: Callable[[], None] = lambda: None) -> None:
        """`waiting` is called after each check that finds that the server is not yet paused."""
        super().__init__(base_url, timeout=timeout_s)
        self._headers = access(key)
        self.version = 0
        self._waiting = waiting

    def start_weight_update(self) -> None:
        """Waits until the server is paused, then starts the update. Raises `TimeoutError` if the server is not paused within the timeout,
        and `httpx.HTTPError` if a request fails."""
        deadline = time.monotonic() + self.timeout
        with self._client() as http:
            while not http.get("/is_paused").raise_for_status().json()["is_paused"]:
                self._waiting()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the server was not paused for version {self.version} within {self.timeout:g} s")
                time.sleep(_POLL_S)
        super().start_weight_update()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends the update and sets the version to `weight_version`; None means `self.version`."""
        super().finish_weight_update(weight_version or str(self.version))

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        with self._client() as http:
            http.post(f"/{path}", json=json).raise_for_status()

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.base_url, headers=self._headers, timeout=self.timeout, trust_env=False)


class DeepSpeedWeightSource(WeightSource):  # type: ignore[misc]  # vLLM's types are not followed
    """Named full parameters of a `PolicyEngine`, in metadata order, on every rank.

    With tied embeddings, the output head is sent too, under its own name, because a server may hold a packed copy of it.
    """

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine
        self._aliases = _aliases(engine)

    def metadata(self) -> list[ParamMeta]:
        """Returns the name, the dtype and the full shape of each tensor, without gathering the tensors."""
        return [ParamMeta(name, parameter.dtype, shape) for name, parameter, shape in self._entries()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields pairs `(name, full tensor on the engine's device)`. Under ZeRO-3, the tensor is a copy, and the gathered memory is freed
        at once; otherwise it is the parameter."""
        for name, parameter, _ in self._entries():
            with self._engine.gathered(parameter) as full:
                tensor = full.clone() if hasattr(parameter, "ds_id") else full
            yield name, tensor

    def _entries(self) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
        for name, parameter, shape in self._engine.parameters():
            yield name, parameter, shape
            if name in self._aliases:
                yield self._aliases[name], parameter, shape


def connect(engine: PolicyEngine, client: PausedServerClient, *, master_address: str, master_port: int) -> NCCLTrainerWeightTransferEngine:
    """Opens the NCCL channel to a server started with `--weight-transfer-config '{"backend": "nccl"}'`. Must be called on all ranks.

    For each update, set `client.version` and call `send_weights()` on the returned engine, on all ranks, while the server is paused. Rank 0
    listens at the master address for the server's worker; the server has one GPU.
    """
    info = NCCLTrainerInitInfo(rank=engine.ranks.rank, master_address=master_address, master_port=master_port, world_size=2)
    channel: NCCLTrainerWeightTransferEngine = NCCLTrainerWeightTransferEngine.trainer_init(
        info, client=client, source=DeepSpeedWeightSource(engine)
    )
    return channel


def _aliases(engine: PolicyEngine) -> dict[str, str]:
    """Returns a mapping from the first name of each tied parameter to its second name."""
    first: dict[int, str] = {}
    second: dict[str, str] = {}
    for name, parameter in engine.lm.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            second[first[id(parameter)]] = name
        else:
            first[id(parameter)] = name
    return second
