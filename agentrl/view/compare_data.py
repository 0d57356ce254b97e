"""The comparison of two or more runs: what differs in their recipes, their curves, success by kind with intervals, and cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.observe.charts import MAX_POINTS
from agentrl.observe.run_comparison import compare_folders
from agentrl.view.source import RunSource

CURVES = ("reward_mean", "heldout", "entropy", "kl_behaviour", "clip_fraction", "grad_norm", "completion_tokens_mean", "step_s")


def compare_runs(sources: Sequence[RunSource]) -> dict[str, Any]:
    """Returns the comparison as JSON data, with the runs in the given order."""
    notes = []
    for source in sources:
        with source.lock:
            notes += [f"{source.name}: {note}" for note in source.refresh()]
    compared = compare_folders([source.path for source in sources])
    return {
        "runs": [{"id": source.id, "name": source.name} for source in sources],
        "curves": {key: [source.metrics.curve(key, MAX_POINTS) for source in sources] for key in CURVES},
        **_shortened(compared.to_data()),
        "notes": notes,
    }


def _shortened(data: Mapping[str, Any]) -> dict[str, Any]:
    """Cuts the values of settings, which a third party may have written."""
    settings = [
        {"key": row["key"][:200], "values": [value if len(value) <= 400 else f"{value[:400]}…" for value in map(_text, row["values"])]}
        for row in data["settings"][:400]
    ]
    return {**data, "settings": settings}


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
