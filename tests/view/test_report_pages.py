"""The report in a real browser: its charts, wide and narrow, in the dark, and without JavaScript."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.base.files import append_lines, json_line
from agentrl.observe import write_report
from tests.view.conftest import check

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OUTSIDE = """() => [...document.querySelectorAll("svg.chart")].flatMap((svg) => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("path.line, circle")].map((e) => e.getBoundingClientRect())
    .filter((r) => r.left < box.left - 9 || r.right > box.right + 9 || r.top < box.top - 9 || r.bottom > box.bottom + 9);
}).length"""


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with values of any size, and more steps than a chart has points."""
    folder = tmp_path_factory.mktemp("report")
    for name in ("recipe.json", "summary.json"):
        (folder / name).write_bytes((runs / "demo" / name).read_bytes())
    lines = [
        {
            "step": n,
            "reward_mean": (n % 7) / 7,
            "entropy": 1e99 * (-1) ** n,
            "loss": -3e-9,
            "kl_behaviour": 5.0,
            "ratio_max": 1.5,
            "ratio_min": 0.5,
        }
        for n in range(1, 2000)
    ]
    append_lines(folder / "metrics.jsonl", [json_line(line | {"heldout": 0.5, "heldout_real": 0.25}) for line in lines[::200]])
    append_lines(folder / "metrics.jsonl", [json_line(line) for line in lines[1::3]])
    return write_report(folder)


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
def test_every_chart_is_drawn_inside_its_frame(browser: Any, report: Path, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(report.as_uri())
    figures = page.locator("svg.chart").count()
    assert figures == 5 and page.locator("figure[data-chart]").count() == 0 and problems == []
    assert page.evaluate(OUTSIDE) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert check(page, "pale") == []
    page.locator("svg.chart").first.hover()
    assert "mean training reward" in page.locator(".tip:visible").inner_text()
    page.close()


def test_without_javascript_the_ends_of_each_curve_are_shown(browser: Any, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    text = page.locator("body").inner_text()
    assert "Charts need JavaScript" in text and "KL: 5 at step 1, 5 at step 1997" in text
    context.close()
