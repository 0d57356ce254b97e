"""Failures from elsewhere and to elsewhere: chat messages of OpenAI, spans of OpenTelemetry, trajectories in ATIF.

Everything here is said by somebody else's file: it is bounded, never run, and no path or address in it is followed.
"""

from agentrl.failure.formats.files import UnreadableDocument
from agentrl.failure.formats.reading import FORMATS, read, read_all
from agentrl.failure.formats.writing import WRITTEN, write

__all__ = ["FORMATS", "WRITTEN", "UnreadableDocument", "read", "read_all", "write"]
