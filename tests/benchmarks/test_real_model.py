"""The page of the pretrained model is what is kept beside it, and a target that is missed is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.real_model import BEGIN, END, ROOT, Outcome, kept, page

OUT = ROOT / "docs" / "a-real-model"


def test_the_page_is_made_of_the_results_beside_it() -> None:
    text = (ROOT / "docs" / "a-real-model.md").read_text().partition(BEGIN)[2].partition(END)[0]
    assert text.strip() == page(kept(OUT), json.loads((OUT / "as-published.json").read_text()))


def test_every_target_that_a_run_missed_is_named(tmp_path: Path) -> None:
    one = kept(OUT)[0]
    assert one.missed() == []
    (tmp_path / "smollm2-seed0.json").write_text((OUT / "smollm2-seed0.json").read_text())
    (again,) = kept(tmp_path)
    assert isinstance(again, Outcome) and again == one
    worse = json.loads(json.dumps(one.phases))
    worse["after"]["heldout"] |= {"value": 0.5}
    worse["after"]["heldout"]["by_kind"]["chain_sum"] |= {"value": 0.8}
    worse["after"]["heldout_real"] |= {"ci_high": 0.1}
    slow = replace(one, wall_s=46 * 60.0, peak_gib=12.5, phases=worse)
    assert slow.missed() == ["46.0 minutes", "12.5 GiB", "held-out 0.50", "chain_sum 0.80", "worse on kinds never trained"]
