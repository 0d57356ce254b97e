"""Serving: a vLLM server as a child process, its token client, and hot weight swaps."""

from agentrl.serving.client import TokenClient
from agentrl.serving.nccl import NcclWeightChannel
from agentrl.serving.server import VLLMServer, serving_device
from agentrl.serving.swap import FileWeightChannel
from agentrl.serving.transport import UnsentError

__all__ = ["FileWeightChannel", "NcclWeightChannel", "TokenClient", "UnsentError", "VLLMServer", "serving_device"]
