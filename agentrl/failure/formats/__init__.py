"""Third-party trace formats: OpenAI chat messages, OpenTelemetry spans, ATIF trajectories.

All input is untrusted: its size is bounded, it is never executed, and no path or address in it is opened.
"""

from agentrl.failure.formats.files import UnreadableDocument
from agentrl.failure.formats.registry import FORMATS, WRITTEN, read, read_all, write

__all__ = ["FORMATS", "WRITTEN", "UnreadableDocument", "read", "read_all", "write"]
