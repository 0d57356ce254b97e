"""The pages in a real browser: from a curve to a token in few clicks, with the keyboard, on narrow screens, in dark mode."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.view.conftest import Opener, ServedView, Watched, check
from tests.view.runs import FALL

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGES = (
    *("#/", "#/run/demo", f"#/run/demo/steps/{FALL}", "#/run/demo/groups", "#/run/demo/groups/4", "#/run/demo/groups/4/0"),
    *(
        "#/run/demo/groups/4/0/0/1",
        "#/run/demo/episodes?text=rows",
        "#/run/demo/evaluated/after-heldout-00002-a0",
        "#/run/demo/failures",
        "#/run/demo/failures/g000004-0-a0",
    ),
    "#/compare?run=demo&run=other",
)


def test_six_clicks_lead_from_a_drop_of_the_reward_to_a_token(view: ServedView, watch: Opener) -> None:
    """The reward drops at step 3, because no attempt of kind join is right. Every click is on a visible element."""
    tab = watch(view)
    page, clicks = tab.page, 0

    def click(selector: str) -> None:
        nonlocal clicks
        clicks += 1
        page.locator(selector).first.click()
        tab.settle()

    tab.open("#/run/demo")
    click(f"[data-drop='{FALL}']")
    assert page.locator("h1").inner_text() == f"Step {FALL}" and "0.5 → 0.375" in page.locator(".top").inner_text()
    worst = page.locator("table.kinds tbody tr").first.inner_text()
    assert worst.startswith("join") and "\N{MINUS SIGN}50 points" in worst
    click("[data-group]")  # the lowest score first
    assert page.locator("h1").inner_text() == "Group 4"
    page.go_back()
    tab.settle()
    page.locator("select[aria-label='Kind of task']").select_option("count")
    click("[data-group='5']")
    assert "Scores differ" in page.locator(".signal").inner_text()
    click("[data-attempt='3']")
    assert (
        "advantage \N{MINUS SIGN}1.5" in page.locator(".top").inner_text() and "answer '4', truth '3'" in page.locator("main").inner_text()
    )
    click("[data-turn='0.1']")
    click(".token:has-text('4')")
    detail = page.locator(".token-detail").inner_text()
    assert re.search(r"mask\s+1: in the loss", detail) and re.search("advantage\\s+\N{MINUS SIGN}1\\.5", detail) and "version 0" in detail
    assert re.search(r"logprob when sampled\s+-0\.5", detail) and re.search(r"ratio\s+not recorded", detail)
    assert clicks == 6
    expected = strongest_push(page)
    page.locator("[data-jump='push']").click()
    assert page.locator("[aria-selected='true']").get_attribute("data-token") == str(expected)


def strongest_push(page: Any) -> int:
    """Returns the index of the token whose details show the largest push."""
    pushes = []
    for token in page.locator(".token").all():
        token.click()
        (push,) = re.findall(r"push\s+(\S+)", page.locator(".token-detail").inner_text())
        pushes.append(0.0 if push == "\N{EN DASH}" else float(push.lstrip("+\N{MINUS SIGN}")))
    return max(range(len(pushes)), key=lambda n: pushes[n])


def test_a_click_or_arrow_keys_on_the_curve_open_a_step(view: ServedView, watch: Opener) -> None:
    tab = watch(view)
    tab.open("#/run/demo")
    chart = tab.page.locator("svg.chart.picks").first
    box = chart.bounding_box()
    chart.click(position={"x": box["width"] - 25, "y": box["height"] / 2})
    tab.until("location.hash === '#/run/demo/steps/5'")
    tab.open("#/run/demo")
    chart.focus()
    for key in ("ArrowLeft", "ArrowLeft", "Enter"):
        chart.press(key)
    tab.until("location.hash === '#/run/demo/steps/4'")


def test_the_keyboard_reaches_every_page(view: ServedView, watch: Opener) -> None:
    """j and k walk the episodes across groups, t opens tokens, u goes up, and ? shows the keys of the page."""
    tab = watch(view)
    page = tab.page
    tab.open("#/run/demo/groups/4/3")
    for key, hash_ in (
        ("k", "groups/4/2"),
        ("j", "groups/4/3"),
        ("j", "groups/5/0"),
        ("t", "groups/5/0/0/0"),
        ("u", "groups/5/0"),
        ("u", "groups/5"),
    ):
        page.keyboard.press(key)
        tab.until(f"location.hash.split('?')[0] === '#/run/demo/{hash_}'")
        tab.settle()
    for hash_ in (f"steps/{FALL}", ""):
        page.keyboard.press("u")
        tab.until(f"location.hash === '#/run/demo{hash_ and '/' + hash_}'")
        tab.settle()
    page.keyboard.press("?")
    assert "episodes" in page.locator("dialog[open]").inner_text()
    page.keyboard.press("Escape")
    tab.open("#/run/demo/groups/4/0/0/0")
    page.locator(".tokens").focus()
    page.keyboard.press("End")
    assert page.locator("[aria-selected='true']").inner_text() == "<|im_end|>"
    assert page.evaluate("location.hash").endswith(f"token={page.locator('.token').count() - 1}"), "the address has the token"


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
def test_pages_fit_the_screen_and_their_text_has_enough_contrast(view: ServedView, watch: Opener, width: int, scheme: str) -> None:
    """Text has a contrast of at least 4.5 to its background (WCAG 2.2, 1.4.3)."""
    tab = watch(view, viewport={"width": width, "height": 800}, color_scheme=scheme)
    for address in PAGES:
        tab.open(address)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, address
        assert low_contrast(tab.page) == [], address


def test_every_control_has_a_name_and_every_page_an_outline(view: ServedView, watch: Opener) -> None:
    """The basic checks of axe-core: names of controls, one h1, landmarks, unique ids, labels of fields, a language."""
    tab = watch(view)
    for address in PAGES:
        tab.open(address)
        outline = check(tab.page, "outline")
        assert outline["unnamed"] == [] and outline["doubled"] == [] and outline["unlabelled"] == [], (address, outline)
        assert outline["h1"] == 1 and outline["main"] == 1 and outline["lang"] == "en", (address, outline)
        assert outline["focus"] in ("H1", "MAIN", "BODY"), (address, outline)
        tree = tab.page.locator("main").aria_snapshot()
        assert "heading" in tree and "[level=1]" in tree, address


def test_a_page_loads_less_than_half_a_megabyte(view: ServedView, watch: Opener) -> None:
    tab = watch(view)
    tab.open("#/run/demo")
    weight = check(tab.page, "weight")
    assert 50_000 < weight < 500_000


def test_filters_and_full_text_search_are_in_the_address(view: ServedView, watch: Opener) -> None:
    tab = watch(view)
    page = tab.page
    tab.open("#/run/demo/episodes")
    page.get_by_text("44 episodes match", exact=True).wait_for()
    page.locator("select[name=kind]").select_option("join")
    page.locator("select[name=outcome]").select_option("failed")
    page.locator("input[name=step]").fill(str(FALL))
    page.get_by_text("4 episodes match", exact=True).wait_for()
    address = page.evaluate("location.hash")
    assert "kind=join" in address and "outcome=failed" in address and f"step={FALL}" in address
    other = watch(view)
    other.open(address)
    other.page.get_by_text("4 episodes match", exact=True).wait_for()  # a permalink
    page.locator("input[name=text]").fill("nowhere")
    page.locator("main:has-text('No episode matches')").wait_for()


def test_two_runs_are_compared_with_their_settings_and_curves(view: ServedView, watch: Opener) -> None:
    tab = watch(view)
    page = tab.page
    for box in page.locator("tbody input[type=checkbox]").all():
        box.check()
    page.get_by_role("button", name="Compare 2 runs").click()
    page.locator("h1:has-text('Compare 2 runs')").wait_for()
    text = page.locator("main").inner_text()
    assert "learner.lr" in text and "2e-05" in text and "steps" in text
    assert page.locator("svg.chart path.line").count() >= 4


def low_contrast(page: Any) -> list[str]:
    return list(check(page, "pale"))


def test_the_contrast_check_detects_pale_text(view: ServedView, watch: Opener) -> None:
    tab: Watched = watch(view)
    tab.open("#/run/demo")
    tab.page.evaluate("document.querySelector('h1').style.color = '#bbbbbb'")
    assert low_contrast(tab.page) != []
