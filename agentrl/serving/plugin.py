"""agentrl's vLLM plugin (entry point group `vllm.general_plugins`): registers the file weight-transfer engine.

vLLM calls `register` in each of its processes. Only the process that holds the model imports the engine's module, and with it torch.
"""

from __future__ import annotations

BACKEND = "agentrl_file"


def register() -> None:
    """Registers `--weight-transfer-config '{"backend": "agentrl_file"}'` with vLLM. Idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "agentrl.serving.weight_engine", "FileWeightTransferEngine")
