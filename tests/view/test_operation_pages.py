"""The buttons that change a run ask first, and show what happened."""

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


def test_a_trace_is_tagged_and_labelled_and_an_episode_scored_after_a_question(runs: Path, tmp_path: Path, watch: Opener) -> None:
    run = shutil.copytree(runs / "demo", tmp_path / "demo")
    maker = RunMaker(run)
    group = maker.sample(100, pending=True)
    maker.close()
    with serving(tmp_path) as view:
        opened = watch(view)
        page = opened.page
        opened.open("#/run/demo/failures/g000004-0-a0")
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
        opened.open("#/run/demo/groups/100/2")
        page.get_by_label("review, from 0 to 1").fill("0.5")
        page.get_by_role("button", name="Send score").click()
        page.get_by_role("button", name="Confirm").click()
        page.locator("[role=status]:has-text('the score is stored')").wait_for()
        assert [one["operation"] for one in records(run)] == ["tag", "label", "score"]
        assert records(run)[2]["episode_id"] == group.episodes[2].episode.id and {one["by"] for one in records(run)} == {"anna"}
        opened.end(view.url)
