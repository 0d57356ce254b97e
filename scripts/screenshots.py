"""Regenerates the pictures of docs/see-a-run.md from a finished run of the quickstart.

    python scripts/screenshots.py runs/quickstart [--out docs/images]

Needs chromium (`make browser`). The run is compared with a second run in the same folder, if there is one. Each picture shows the part of a
page that answers one question, and has at most 150 KB.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentrl.experience.episode_index import EpisodeIndex
from agentrl.experience.episode_query import EpisodeQuery
from agentrl.view import RunLibrary, ViewServer
from agentrl.view.source import RunSource
from agentrl.view.training import train_group

WIDTH, HEIGHT = 1120, 760
MOST_BYTES = 150_000
GO = """(hash) => {
  if (location.hash !== hash) delete document.querySelector("main").dataset.shown;
  location.hash = hash;
}"""
BOX = """(selector) => {
  const start = document.querySelector(selector), section = start.closest("section");
  const whole = section || document.querySelector("main").lastElementChild;
  window.scrollTo({ top: start.getBoundingClientRect().top + scrollY - 64, behavior: "instant" });
  return [section ? 52 : 0, whole.getBoundingClientRect().bottom + 16];
}"""
"""Scrolls to an element, and returns the top and bottom of what a picture of it shows: its section, or the window."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yields the address of a view of a folder."""
    server, loop = ViewServer(library=RunLibrary(folder), read_only=True), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def pictures(run: Path) -> dict[str, tuple[str, str]]:
    """Returns name of a picture -> address of its page, and selector of the first element that it shows."""
    source = RunSource(run, run_id=run.name, name=run.name)
    source.refresh()
    rewards = source.metrics.series("reward_mean")
    change = {step: value - before for (_, before), (step, value) in pairwise(rewards)}
    step = min(change, key=lambda step: change[step])
    entries = [entry for entry in source.store().entries(step=step - 1) if entry.use is not None]
    clipped = _clipped(source, [entry.index for entry in entries if entry.use is not None and entry.use.tokens_trained])
    silent = next(entry.index for entry in entries if entry.use is not None and not entry.use.tokens_trained)
    with EpisodeIndex(run) as index:
        failed = index.search(EpisodeQuery(outcome="failed", text="Error", phase="train")).rows[0]
    source.close()
    base, others = (
        f"#/run/{quote(run.name)}",
        sorted(path.name for path in run.parent.iterdir() if (path / "summary.json").exists() and path != run),
    )
    compared = {"compare": (f"#/compare?run={quote(others[0])}&run={quote(run.name)}", "h1")} if others else {}
    return {
        "step": (f"{base}/steps/{step}", "h1"),
        "tokens": (f"{base}/groups/{clipped}", ".lenses"),
        "solved": (f"{base}/episodes?outcome=solved&sort=tokens&ascending=1", ".filters"),
        "group": (f"{base}/groups/{silent}", "h1"),
        "call": (f"{base}/groups/{failed.group}/{failed.attempt}", "h1"),
        "ledger": (base, "#s-ledger"),
        "parts": (base, "#s-parts"),
        "curves": (base, "#s-curves"),
        "failures": (f"{base}/failures", "h1"),
        **compared,
    }


def _clipped(source: RunSource, groups: list[int]) -> str:
    """Returns the path of a turn with a clipped token, or else of the first turn of a trained attempt."""
    from agentrl.view.episode_data import tokens_data

    first = ""
    for group in groups:
        entry, content = source.store().entry(group), source.group(group)
        assert entry is not None
        training = train_group(source, entry, content)
        for attempt, scored in enumerate(content.episodes):
            if not training.advantages[attempt]:
                continue
            for turn in range(len(scored.episode.trajectories[0].turns)):
                data, path = tokens_data(source, group, attempt, 0, turn), f"{group}/{attempt}/0/{turn}"
                first = first or path
                if any(data.get("clipped") or ()):
                    return f"{path}?token={list(data['clipped']).index(True)}"
    return first


def shoot(page: Any, address: str, selector: str, path: Path) -> None:
    """Writes one picture."""
    page.evaluate(GO, address)
    page.wait_for_selector(f"main[data-shown='{address}']:not([aria-busy])")
    page.wait_for_selector(selector)
    page.wait_for_timeout(500)  # parts of a page that arrive later
    top, bottom = page.evaluate(BOX, selector)
    page.screenshot(path=path, clip={"x": 0, "y": top, "width": WIDTH, "height": min(HEIGHT, bottom) - top})
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size:,} bytes, more than {MOST_BYTES:,}")


def main() -> None:
    """Writes all pictures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "images")
    args = parser.parse_args()
    run = args.run.resolve()
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root; the pages are ours
    with served(run.parent) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(url)
        for name, (address, selector) in pictures(run).items():
            shoot(page, address, selector, args.out / f"view-{name}.png")
            print(args.out / f"view-{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
