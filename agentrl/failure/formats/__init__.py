"""Third-party trace formats: OpenAI chat messages, OpenTelemetry spans, ATIF trajectories.

All input is hostile: it is bounded, never executed, and no path or address in it is followed.
"""

from agentrl.failure.formats.files import UnreadableDocument
from agentrl.failure.formats.reading import FORMATS, read, read_all
from agentrl.failure.formats.writing import WRITTEN, write

__all__ = ["FORMATS", "WRITTEN", "UnreadableDocument", "read", "read_all", "write"]
