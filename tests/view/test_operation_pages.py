"""Buttons that change a run ask for confirmation and show the result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.view.conftest import Opener, serving
from tests.view.runs import RunMaker

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def records(run: Path) -> list[dict[str, object]]:
    path = run / "operations.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_tags_labels_and_scores_are_recorded_after_a_confirmation(runs: Path, tmp_path: Path, watch: Opener) -> None:
    run = shutil.copytree(runs / "demo", tmp_path / "demo")
    maker = RunMaker(run)
    group = maker.sample(100, pending=True)
    maker.close()
    with serving(tmp_path) as view:
        tab = watch(view)
        page = tab.page
        tab.open("#/run/demo/failures/g000004-0-a0")
        page.get_by_label("tag, such as misread_output").fill("wrong_unit")
        page.get_by_role("button", name="Tag", exact=True).click()
        page.locator("dialog[open]").get_by_role("button", name="Cancel").click()
        assert records(run) == [] and page.locator("dialog[open]").count() == 0
        page.get_by_role("button", name="Tag", exact=True).click()
        assert "Tag g000004-0-a0 as wrong_unit" in page.locator("dialog[open]").inner_text()
        page.get_by_role("button", name="Confirm").click()
        page.locator("text=wrong_unit by person:anna").wait_for()
        page.get_by_role("button", name="wrong", exact=True).click()
        page.get_by_role("button", name="Confirm").click()
        page.locator("[role=status]:has-text('is labelled wrong')").wait_for()
        tab.open("#/run/demo/groups/100/2")
        page.get_by_label("review, from 0 to 1").fill("0.5")
        page.get_by_role("button", name="Send score").click()
        page.get_by_role("button", name="Confirm").click()
        page.locator("[role=status]:has-text('the score is stored')").wait_for()
        assert [record["operation"] for record in records(run)] == ["tag", "label", "score"]
        assert records(run)[2]["episode_id"] == group.episodes[2].episode.id and {record["by"] for record in records(run)} == {"anna"}
        tab.end(view.url)
