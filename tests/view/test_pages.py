"""The pages in a real browser: from a curve to the token in few clicks, by keyboard too, on narrow screens, in the dark."""

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


def test_from_a_fall_of_the_reward_to_the_token_in_six_clicks(view: ServedView, watch: Opener) -> None:
    """The reward falls at step 3, because no attempt of kind join is right. Every click is on something that the page shows."""
    opened = watch(view)
    page, clicks = opened.page, 0

    def click(selector: str) -> None:
        nonlocal clicks
        clicks += 1
        page.locator(selector).first.click()
        opened.settle()

    opened.open("#/run/demo")
    click(f"[data-drop='{FALL}']")
    assert page.locator("h1").inner_text() == f"Step {FALL}" and "0.5 → 0.375" in page.locator(".top").inner_text()
    worst = page.locator("table.kinds tbody tr").first.inner_text()
    assert worst.startswith("join") and "\N{MINUS SIGN}50 points" in worst
    click("[data-group]")  # the lowest score first
    assert page.locator("h1").inner_text() == "Group 4"
    page.go_back()
    opened.settle()
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
    """The token whose details show the largest push."""
    pushes = []
    for token in page.locator(".token").all():
        token.click()
        (push,) = re.findall(r"push\s+(\S+)", page.locator(".token-detail").inner_text())
        pushes.append(0.0 if push == "\N{EN DASH}" else float(push.lstrip("+\N{MINUS SIGN}")))
    return max(range(len(pushes)), key=lambda n: pushes[n])


def test_a_click_on_the_curve_opens_its_step_and_arrow_keys_do_too(view: ServedView, watch: Opener) -> None:
    opened = watch(view)
    opened.open("#/run/demo")
    chart = opened.page.locator("svg.chart.picks").first
    box = chart.bounding_box()
    chart.click(position={"x": box["width"] - 25, "y": box["height"] / 2})
    opened.until("location.hash === '#/run/demo/steps/5'")
    opened.open("#/run/demo")
    chart.focus()
    for key in ("ArrowLeft", "ArrowLeft", "Enter"):
        chart.press(key)
    opened.until("location.hash === '#/run/demo/steps/4'")


def test_every_page_is_reached_and_left_by_keyboard(view: ServedView, watch: Opener) -> None:
    """j and k walk the episodes across groups, t opens tokens, u goes up, and ? shows the keys of the page."""
    opened = watch(view)
    page = opened.page
    opened.open("#/run/demo/groups/4/3")
    for key, hash_ in (
        ("k", "groups/4/2"),
        ("j", "groups/4/3"),
        ("j", "groups/5/0"),
        ("t", "groups/5/0/0/0"),
        ("u", "groups/5/0"),
        ("u", "groups/5"),
    ):
        page.keyboard.press(key)
        opened.until(f"location.hash.split('?')[0] === '#/run/demo/{hash_}'")
        opened.settle()
    for hash_ in (f"steps/{FALL}", ""):
        page.keyboard.press("u")
        opened.until(f"location.hash === '#/run/demo{hash_ and '/' + hash_}'")
        opened.settle()
    page.keyboard.press("?")
    assert "episodes" in page.locator("dialog[open]").inner_text()
    page.keyboard.press("Escape")
    opened.open("#/run/demo/groups/4/0/0/0")
    page.locator(".tokens").focus()
    page.keyboard.press("End")
    assert page.locator("[aria-selected='true']").inner_text() == "<|im_end|>"
    assert page.evaluate("location.hash").endswith(f"token={page.locator('.token').count() - 1}"), "the address has the token"


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
def test_no_page_is_wider_than_the_screen_and_its_text_can_be_read(view: ServedView, watch: Opener, width: int, scheme: str) -> None:
    """Text has a contrast of at least 4.5 to its background (WCAG 2.2, 1.4.3)."""
    opened = watch(view, viewport={"width": width, "height": 800}, color_scheme=scheme)
    for address in PAGES:
        opened.open(address)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, address
        assert low_contrast(opened.page) == [], address


def test_every_control_has_a_name_and_every_page_an_outline(view: ServedView, watch: Opener) -> None:
    """What axe-core checks first: names of controls, one h1, landmarks, ids that are unique, labels of fields, a language."""
    opened = watch(view)
    for address in PAGES:
        opened.open(address)
        matches = check(opened.page, "outline")
        assert matches["unnamed"] == [] and matches["doubled"] == [] and matches["unlabelled"] == [], (address, matches)
        assert matches["h1"] == 1 and matches["main"] == 1 and matches["lang"] == "en", (address, matches)
        assert matches["focus"] in ("H1", "MAIN", "BODY"), (address, matches)
        tree = opened.page.locator("main").aria_snapshot()
        assert "heading" in tree and "[level=1]" in tree, address


def test_the_pages_weigh_less_than_half_a_megabyte(view: ServedView, watch: Opener) -> None:
    opened = watch(view)
    opened.open("#/run/demo")
    weight = check(opened.page, "weight")
    assert 50_000 < weight < 500_000


def test_filters_and_full_text_search_are_in_the_address(view: ServedView, watch: Opener) -> None:
    opened = watch(view)
    page = opened.page
    opened.open("#/run/demo/episodes")
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
    opened = watch(view)
    page = opened.page
    for box in page.locator("tbody input[type=checkbox]").all():
        box.check()
    page.get_by_role("button", name="Compare 2 runs").click()
    page.locator("h1:has-text('Compare 2 runs')").wait_for()
    text = page.locator("main").inner_text()
    assert "learner.lr" in text and "2e-05" in text and "steps" in text
    assert page.locator("svg.chart path.line").count() >= 4


def low_contrast(page: Any) -> list[str]:
    return list(check(page, "pale"))


def test_the_check_of_contrast_finds_what_is_too_pale(view: ServedView, watch: Opener) -> None:
    opened: Watched = watch(view)
    opened.open("#/run/demo")
    opened.page.evaluate("document.querySelector('h1').style.color = '#bbbbbb'")
    assert low_contrast(opened.page) != []
