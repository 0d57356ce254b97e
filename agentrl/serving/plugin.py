"""agentrl's vLLM plugin (entry point group `vllm.general_plugins`): registers the file weight-transfer engine.

vLLM calls `register` in each of its processes before it reads its configuration. Only the process that holds the model imports
the engine's module, and with it torch.
"""

from __future__ import annotations

BACKEND = "agentrl_file"


def register() -> None:
    """Makes `--weight-transfer-config '{"backend": "agentrl_file"}'` known to vLLM. Safe to call more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "agentrl.serving.weight_engine", "FileWeightTransferEngine")
