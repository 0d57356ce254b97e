"""vLLM servers as child processes, the token client, and hot weight swaps."""

from agentrl.serving.client import TokenClient
from agentrl.serving.server import VLLMServer
from agentrl.serving.swap import FileWeightChannel, NcclWeightChannel
from agentrl.serving.transport import UnsentError

__all__ = ["FileWeightChannel", "NcclWeightChannel", "TokenClient", "UnsentError", "VLLMServer"]
