"""The page of the pretrained model is rendered from the stored results, and missed targets are listed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.real_model import BEGIN, END, ROOT, Outcome, page, stored_outcomes

OUT = ROOT / "docs" / "a-real-model"


def test_the_page_is_rendered_from_the_stored_results() -> None:
    text = (ROOT / "docs" / "a-real-model.md").read_text().partition(BEGIN)[2].partition(END)[0]
    assert text.strip() == page(stored_outcomes(OUT), json.loads((OUT / "as-published.json").read_text()))


def test_every_missed_target_of_a_run_is_listed(tmp_path: Path) -> None:
    outcome = stored_outcomes(OUT)[0]
    assert outcome.missed() == []
    (tmp_path / "smollm2-seed0.json").write_text((OUT / "smollm2-seed0.json").read_text())
    (reloaded,) = stored_outcomes(tmp_path)
    assert isinstance(reloaded, Outcome) and reloaded == outcome
    worse = json.loads(json.dumps(outcome.phases))
    worse["after"]["heldout"] |= {"value": 0.5}
    worse["after"]["heldout"]["by_kind"]["chain_sum"] |= {"value": 0.8}
    worse["after"]["heldout_real"] |= {"ci_high": 0.1}
    slow = replace(outcome, wall_s=46 * 60.0, peak_gib=12.5, phases=worse)
    assert slow.missed() == ["46.0 minutes", "12.5 GiB", "held-out 0.50", "chain_sum 0.80", "worse on kinds never trained"]
