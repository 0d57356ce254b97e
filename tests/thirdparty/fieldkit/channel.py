"""The file channel, with a journal of its swaps."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.records import PolicyVersion, Probe, SwapReport
from agentrl.serving import FileWeightChannel, VLLMServer


class JournalChannel:
    """A `WeightChannel`; `journal` is a file in the run folder."""

    def __init__(self, server: VLLMServer, *, registry_folder: Path, journal: str = "swaps.jsonl") -> None:
        self._inner = FileWeightChannel(server, registry_folder=registry_folder)
        self._journal = registry_folder.parent / journal

    async def swap(self, version: PolicyVersion, folder: Path, probe: Probe, *, max_abs_diff: float, timeout_s: float) -> SwapReport:
        report = await self._inner.swap(version, folder, probe, max_abs_diff=max_abs_diff, timeout_s=timeout_s)
        with self._journal.open("a") as file:
            file.write(json.dumps({"version": version.number, "stall_ms": report.stall_ms}) + "\n")
        return report

    async def close(self) -> None:
        await self._inner.close()
