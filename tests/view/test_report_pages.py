"""The report in a real browser: its charts, wide and narrow, in dark mode, and without JavaScript."""

from __future__ import annotations

import json
import shutil
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


ATTACK = (
    "</script></style></textarea></title><script>window.owned = 1</script><img src=http://evil.example/x onerror='window.owned = 2'>"
    "<svg onload='window.owned = 3'><link rel=stylesheet href=//evil.example/y>\"' onmouseover='window.owned = 4' {{ 7*7 }} \u202e\x1b[31m"
)


def add_attacks(value: Any) -> Any:
    """Returns JSON data with an attack in every text and as an additional key."""
    if isinstance(value, dict):
        return {key: add_attacks(item) for key, item in value.items()} | {ATTACK: next(iter(map(add_attacks, value.values())), ATTACK)}
    if isinstance(value, list):
        return [add_attacks(item) for item in value]
    return value + ATTACK if isinstance(value, str) else value


@pytest.mark.parametrize("scripts", [True, False])
@pytest.mark.parametrize("broken", [False, True])
def test_a_report_of_a_hostile_run_executes_and_loads_no_attack(
    browser: Any, runs: Path, tmp_path: Path, scripts: bool, broken: bool
) -> None:
    """With `broken`, the escaping is removed, and the content security policy alone must block the attacks."""
    folder = tmp_path / "<img src=x onerror=window.owned=5>"
    shutil.copytree(runs / "demo", folder)
    for path in folder.rglob("*.json"):
        if path.name == "summary.json":  # validated: only some of its texts are arbitrary
            summary = json.loads(path.read_text())
            summary |= {"problems": [ATTACK], "versions": {ATTACK: ATTACK}, "left_out_reasons": {ATTACK: 3}, "sandbox_backend": ATTACK}
            path.write_text(json.dumps(summary))
        else:
            path.write_text(json.dumps(add_attacks(json.loads(path.read_text()))))
    for path in folder.rglob("*.jsonl"):
        path.write_text("".join(json.dumps(add_attacks(json.loads(line))) + "\n" for line in path.read_text().splitlines()))
    append_lines(folder / "metrics.jsonl", [json_line({"step": 99, f"part/{ATTACK}": 1.0, "part/b": 0.5, "audit_mean": 0.1})])
    report = write_report(folder)
    if broken:
        text = report.read_text()
        assert text.count("&lt;script&gt;window.owned") > 20
        body = text.partition("<body>")[2]
        report.write_text(text.replace(body, body.replace("&lt;", "<").replace("&gt;", ">").replace("&#39;", "'").replace("&#34;", '"')))
    context = browser.new_context(java_script_enabled=scripts)
    page = context.new_page()
    requests: dict[str, str | None] = {}
    dialogs: list[str] = []
    page.on("request", lambda request: requests.setdefault(request.url))
    page.on("requestfailed", lambda request: requests.__setitem__(request.url, request.failure))
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.goto(report.as_uri())
    page.mouse.move(200, 200)
    page.emulate_media(media="print")
    assert requests.pop(report.as_uri()) is None and {*requests.values()} <= {"csp"} and (broken or not requests) and dialogs == []
    if scripts:
        assert page.evaluate("window.owned") is None
    if not broken:
        assert page.locator("img, link, iframe, svg:not(.chart)").count() == 0
        shown = page.locator("body").inner_text()
        assert "window.owned" in shown and "\u202e" not in shown and "\x1b" not in shown and "49" not in shown.partition("{{")[2][:3]
        if scripts:
            assert page.locator("figure[data-chart]").count() == 0 and page.locator("svg.chart").count() > 3
    context.close()
