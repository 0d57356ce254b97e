"""The trainer side of vLLM's GPU weight transfer: full tensors from a DeepSpeed engine straight into the server's memory.

vLLM ships sources for plain and FSDP modules but none for DeepSpeed. Under ZeRO-3 a parameter is empty until it is gathered,
and gathering is a collective: every rank iterates over the parameters in the order of `metadata()`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from agentrl.learner.engine import PolicyEngine
from agentrl.serving.trainer_client import PausedServerClient


class DeepSpeedWeightSource(WeightSource):  # type: ignore[misc]  # vllm is not seen by the type checker
    """Named full parameters of a `PolicyEngine`, in metadata order, on every rank. Each iteration is a fresh pass.

    With tied embeddings the output head is sent too, under its own name: a server with a packed copy of the head would otherwise
    keep the old one.
    """

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine
        self._aliases = _aliases(engine)

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and full shape of what iteration yields, without gathering."""
        return [ParamMeta(name, parameter.dtype, shape) for name, parameter, shape in self._entries()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields `(name, full tensor on the engine's device)`. The caller owns the tensor; the gathered memory is freed at once."""
        for name, parameter, _ in self._entries():
            with self._engine.gathered(parameter) as full:
                tensor = full.clone() if hasattr(parameter, "ds_id") else full
            yield name, tensor

    def _entries(self) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
        for name, parameter, shape in self._engine.parameters():
            yield name, parameter, shape
            if name in self._aliases:
                yield self._aliases[name], parameter, shape


def connect(
    engine: PolicyEngine, client: PausedServerClient, *, master_address: str, master_port: int, server_ranks: int
) -> NCCLTrainerWeightTransferEngine:
    """Opens the NCCL channel to a server started with `--weight-transfer-config '{"backend": "nccl"}'`. All ranks call it.

    Then, with the server paused, set `client.version` and call `send_weights()` on the result, again on all ranks, for one
    complete update. `shutdown()` closes the channel.

    Args:
        client: of the server's control routes.
        master_address, master_port: where rank 0 listens for the server's workers.
        server_ranks: GPUs of the server (tensor times data parallel).
    """
    info = NCCLTrainerInitInfo(rank=engine.ranks.rank, master_address=master_address, master_port=master_port, world_size=server_ranks + 1)
    channel: NCCLTrainerWeightTransferEngine = NCCLTrainerWeightTransferEngine.trainer_init(
        info, client=client, source=DeepSpeedWeightSource(engine)
    )
    return channel


def _aliases(engine: PolicyEngine) -> dict[str, str]:
    """First name -> second name of tied parameters."""
    first: dict[int, str] = {}
    second: dict[str, str] = {}
    for name, parameter in engine.lm.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            second[first[id(parameter)]] = name
        else:
            first[id(parameter)] = name
    return second
