"""Transcripts that attack the reader's browser: no part of them runs, loads, hides or breaks the page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agentrl.experience import SqliteStore
from tests.view.conftest import Opener, check, serving
from tests.view.runs import RunMaker, make_run, with_text

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ATTACKS = "\n".join(
    (
        "<script>window.owned = 1; alert(1)</script>",
        "<img src=x onerror='window.owned = 2'><svg onload='window.owned = 3'></svg>",
        "<iframe srcdoc='<script>parent.owned = 4</script>'></iframe><style>* { display: none }</style><base href='//evil.example/'>",
        "[click](javascript:window.owned=5) ![picture](http://evil.example/pixel.png) <a href='javascript:window.owned=6'>x</a>",
        "```html\n<script>window.owned = 7</script>\n```",
        "# <b onclick='window.owned = 8'>title</b>\n- *<i>x</i>* **{{7*7}} ${window.owned=9}**",
        "\u202ereversed\u202c \u2066isolated\u2069 zero\u200bwidth",
        "\x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07link\x1b]8;;\x07 bell\x07 nul\x00",
        "\ud800 lone surrogate".encode("utf-8", "replace").decode(),
        "z" + "\u0301" * 300,
        "&lt;script&gt; &#60;script&#62; %3Cscript%3E \"><script>window.owned = 10</script> '-alert(1)-' </pre></code></td></main>",
        "__proto__ constructor [[Prototype]] `" + "*" * 5000,
    )
)
PAGES = (
    "#/run/hostile",
    "#/run/hostile/steps/1",
    "#/run/hostile/groups",
    "#/run/hostile/groups/0",
    "#/run/hostile/groups/0/0",
    "#/run/hostile/groups/0/0/0/0",
    "#/run/hostile/episodes?text=window",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose groups have attacks as every text, and one whose texts are huge."""
    root = tmp_path_factory.mktemp("hostile")
    make_run(root / "hostile", steps=1)
    store = SqliteStore(root / "hostile" / "experience.sqlite")
    groups = store.groups((0, 1))
    store.close()
    (root / "hostile" / "experience.sqlite").unlink()
    maker = RunMaker(root / "hostile")
    maker.store.put_all([with_text(groups[0], ATTACKS), with_text(groups[1], "A" * 100_000)])
    maker.store.assign(0, [0, 1])
    maker.tracker.alert(ATTACKS)
    maker.tracker.log(2, {"part/" + ATTACKS[:100]: 1.0, "part/b": 0.5, "reward_mean": 0.1})
    maker.close()
    (root / "<img src=x onerror=alert(1)>").mkdir()
    shutil.copy(root / "hostile" / "recipe.json", root / "<img src=x onerror=alert(1)>" / "recipe.json")
    return root


def test_a_hostile_transcript_runs_no_script_and_loads_no_resource(hostile: Path, watch: Opener) -> None:
    """`watch` fails on errors, dialogs, blocked content and requests to other addresses. The text of the attacks is visible."""
    with serving(hostile) as view:
        tab = watch(view)
        page = tab.page
        assert "<img src=x onerror=alert(1)>" in page.locator("main").inner_text(), "names of folders are text"
        for address in PAGES:
            tab.open(address)
            assert page.locator(".problem").count() == 0, (address, page.locator("main").inner_text())
            assert page.evaluate("window.owned") is None, address
            assert (
                page.evaluate("document.querySelectorAll('main script, main iframe, main img, main style, main base, main object').length")
                == 0
            )
            assert page.evaluate("[...document.querySelectorAll('a')].every((a) => a.getAttribute('href').startsWith('#'))"), address
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), address
            for summary in page.locator("summary").all():
                summary.click()
        tab.open("#/run/hostile/groups/0/0")
        text = page.locator("main").inner_text()
        assert "<script>window.owned = 1; alert(1)</script>" in text and "\\u202e" in text and "\\x07" in text and "\x1b" not in text
        page.locator("button:visible:has-text('show all')").first.click()
        tab.open("#/run/hostile/groups/1/0")
        assert "more characters are not shown" in page.locator("main").inner_text()
        assert page.evaluate("document.querySelector('main').innerText.length") < 400_000
        page.evaluate("document.querySelectorAll('main *').forEach((e) => e.click && !e.closest('a') && e.click())")
        assert page.evaluate("window.owned") is None
        tab.end(view.url)


def test_the_content_security_policy_blocks_injected_markup(hostile: Path, browser: object) -> None:
    """If a page inserted markup, the browser would block strings as markup, inline handlers, and requests to other addresses."""
    with serving(hostile) as view:
        page = browser.new_page()  # type: ignore[attr-defined]
        page.goto(view.url)
        refused = check(page, "refusesMarkup")
        assert refused == "TypeError"
        assert check(page, "insertPicture") == "TypeError"
        page.wait_for_timeout(300)
        assert page.evaluate("window.owned") is None
        assert page.evaluate("fetch('http://evil.example/').then(() => 'sent', () => 'blocked')") == "blocked"
        page.close()
