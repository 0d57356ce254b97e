"""A running view, and a browser. Both are shared by the tests of a worker."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.view import RunLibrary, ViewServer
from tests.view.runs import make_run

CHROMIUM = "chromium"


class ServedView:
    """A view in a thread of this process. `page(hash)` is the address of a page, `url` the first one with the token."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.server = ViewServer(library=RunLibrary(root), user="anna", **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.call(self.server.start())
        self.url = self.server.url

    def call(self, awaitable: Any) -> Any:
        """Runs a coroutine in the view's loop."""
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result(30)

    def address(self, page: str) -> str:
        """The address of a page, such as `#/run/demo`."""
        return self.url.partition("?")[0] + page

    def close(self) -> None:
        """Stops the server and its thread."""
        self.call(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@contextmanager
def serving(root: Path, **options: Any) -> Iterator[ServedView]:
    """A running view of a folder."""
    view = ServedView(root, **options)
    try:
        yield view
    finally:
        view.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `demo` and `other`, which no test changes."""
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "demo")
    make_run(root / "other", steps=3, learner={"lr": 2e-5})
    return root


@pytest.fixture(scope="session")
def view(runs: Path) -> Iterator[ServedView]:
    """A view of `runs`."""
    with serving(runs) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium. Root needs --no-sandbox. It ends with each test file, because its event loop would disturb asynchronous tests."""
    from playwright.sync_api import sync_playwright

    path = shutil.which(CHROMIUM)
    assert path is not None, "the tests of pages need Debian's chromium: make browser installs it"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


def check(page: Any, name: str) -> Any:
    """Returns the result of a check of page_checks.js on a page."""
    checks = (Path(__file__).parent / "page_checks.js").read_text()
    return page.evaluate(f"{checks[checks.index('({') :].strip()}.{name}()")


class Watched:
    """A page that records errors, dialogs, blocked content and requests to other addresses, none of which may happen."""

    def __init__(self, context: Any, url: str) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        context.add_init_script(
            "window.blocked = []; document.addEventListener('securitypolicyviolation', (e) => window.blocked.push(e.violatedDirective));"
        )
        self.page = context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("console", lambda message: message.type in ("error", "warning") and self.problems.append(f"console: {message.text}"))
        self.page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def check(self, url: str) -> None:
        """Fails if any of these happened."""
        blocked = self.page.evaluate("window.blocked")
        assert self.problems == [] and blocked == [], (self.problems, blocked)
        base = url.partition("?")[0]
        assert [address for address in self.requests if not address.startswith(base)] == [], "a page sent a request to another address"

    def until(self, expression: str) -> None:
        """Waits until an expression is true. Playwright's own function for that needs `eval`, which the pages forbid."""
        deadline = time.monotonic() + 20
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.page.evaluate('location.href')} {self.problems}"
            self.page.wait_for_timeout(20)

    def settle(self) -> None:
        """Waits until the page of the current address has drawn itself."""
        shown = "(document.querySelector('main').dataset.shown ?? '?').split('?')[0] === location.hash.split('?')[0]"
        self.until(f"{shown} && !document.querySelector('main').hasAttribute('aria-busy')")

    def end(self, url: str) -> None:
        """Checks the page, and leaves it before its server stops."""
        self.check(url)
        self.page.goto("about:blank")

    def open(self, address: str) -> None:
        """Opens a page of the view and waits until it is drawn."""
        self.page.evaluate(
            "(hash) => { if (location.hash !== hash) delete document.querySelector('main').dataset.shown; location.hash = hash; }", address
        )
        self.settle()


Opener = Callable[..., Watched]


@pytest.fixture
def watch(browser: Any) -> Iterator[Opener]:
    """Opens a watched page of a served view; checks it at the end of the test."""
    opened: list[tuple[Any, Watched, str]] = []

    def opener(served: ServedView, **options: Any) -> Watched:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        watched = Watched(context, served.url)
        opened.append((context, watched, served.url))
        watched.settle()
        return watched

    yield opener
    try:
        for _, watched, url in opened:
            watched.check(url)
    finally:
        for context, _, _ in opened:
            context.close()
