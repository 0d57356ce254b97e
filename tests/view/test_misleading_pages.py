"""Pages report unreadable runs, name compared runs in each table, fit a narrow screen, and lay out any text quickly."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.view.conftest import Opener, ServedView, serving

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SLOW_TEXTS = (
    "'\\n'.repeat(99000) + 'x'",
    "' \\n'.repeat(49000) + 'x'",
    "'# ' + ' '.repeat(99000) + '\\rx\\ry'",
    "'- ' + ' '.repeat(99000) + '\\u2028x\\u2028y'",
    "'\\\\`'.repeat(9900)",
    "'\\\\\"'.repeat(9900)",
)


SCRIPT = """async () => {
  const { code, looksLikeMarkdown, markdown } = await import('/static/text.js');
  const start = performance.now(), shown = TEXT;
  looksLikeMarkdown(shown);
  markdown(shown);
  code(shown, 'python');
  return performance.now() - start;
}"""


def test_every_text_is_laid_out_quickly(view: ServedView, watch: Opener) -> None:
    tab = watch(view)
    for text in SLOW_TEXTS:
        assert tab.page.evaluate(SCRIPT.replace("TEXT", text)) < 3000, text


def test_hidden_characters_need_few_elements(view: ServedView, watch: Opener) -> None:
    script = (
        "async () => { const { pre } = await import('/static/text.js'); const built = pre('a' + '\\0'.repeat(5000) + '\\n\\x07b'); return"
    )
    assert watch(view).page.evaluate(f"{script} [built.children.length, built.textContent.length, built.textContent.slice(-6)]; }}") == [
        2,
        1 + 4 * 5000 + 1 + 4 + 1,
        "\n\\x07b",
    ]


def test_every_table_of_a_comparison_has_the_names_of_the_runs(runs: Path, tmp_path: Path, watch: Opener) -> None:
    for name, value in (("demo", 0.5), ("other", 0.75)):
        shutil.copytree(runs / name, tmp_path / name)
        rate = {"value": value, "ci_low": 0.25, "ci_high": 1.0, "n": 8}
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        summary |= {"heldout_before": rate, "heldout_after": rate, "by_kind": {"after": {"join": rate}}}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    with serving(tmp_path) as served:
        tab = watch(served)
        tab.open("#/compare?run=demo&run=other")
        heads = [table.locator("th").all_inner_texts() for table in tab.page.locator("table").all()]
        assert len(heads) == 4 and all({"demo", "other"} <= set(head) for head in heads), heads
        tab.end(served.url)


def test_an_unreadable_store_is_not_shown_as_empty_and_a_damaged_summary_breaks_no_page(runs: Path, tmp_path: Path, watch: Opener) -> None:
    shutil.copytree(runs / "demo", tmp_path / "demo")
    with sqlite3.connect(tmp_path / "demo" / "experience.sqlite") as db:
        db.execute("PRAGMA user_version = 4")
    db.close()
    damaged = {"by_kind": {"after": {"x": None, "y": 5, "z": {"value": 1}}, "before": 3}, "wall_s": {"a": "b", "c": []}, "problems": [{}]}
    (tmp_path / "demo" / "summary.json").write_text(json.dumps(damaged))
    with serving(tmp_path) as served:
        tab = watch(served)
        for page, wrong in (("/groups", "No group is stored"), ("/episodes", "0 stored"), ("/steps/2", "no group of this step")):
            tab.open(f"#/run/demo{page}")
            text = tab.page.locator("main").inner_text()
            assert "schema 4" in text and wrong not in text, text
        tab.open("#/run/demo")
        assert "Reward by step" in tab.page.locator("main").inner_text()
        tab.end(served.url)


def test_the_largest_curve_is_legible_on_a_narrow_screen(view: ServedView, watch: Opener) -> None:
    tab = watch(view, viewport={"width": 400, "height": 800})
    tab.open("#/run/demo")
    heights = "[...document.querySelectorAll('svg text')].map((element) => element.getBoundingClientRect().height)"
    assert min(tab.page.evaluate(heights)) >= 8
    tab.open("#/run/demo/groups")
    rows = "[...document.querySelectorAll('tbody tr')].map((element) => element.getBoundingClientRect().height)"
    assert max(tab.page.evaluate(rows)) <= 80
    tab.end(view.url)
