"""Pages while a run trains, and while its folder is removed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.view.conftest import Opener, serving
from tests.view.runs import RunMaker

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_two_viewers_see_new_steps_and_the_removal_of_a_run(tmp_path: Path, watch: Opener) -> None:
    """Another process drives the run: one page shows the curve, one the newest groups. Neither is reloaded."""
    maker = RunMaker(tmp_path / "live", steps=8)
    maker.step()
    maker.close()
    command = [sys.executable, "-m", "tests.view.runs", str(tmp_path / "live"), "2", "0"]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdin is not None and driver.stdout is not None
    try:
        assert driver.stdout.readline() == "open\n"
        with serving(tmp_path) as view:
            first, second = watch(view), watch(view)
            first.open("#/run/live")
            second.open("#/run/live/groups")
            first.page.locator("#live:has-text('live step 1')").wait_for()
            assert first.page.locator(".tile b").first.inner_text() == "1 / 8"
            for number in (2, 3):
                driver.stdin.write("\n")
                driver.stdin.flush()
                assert driver.stdout.readline() == f"step {number}\n"
                first.page.locator(f".tile b:text-is('{number} / 8')").wait_for()
                second.page.locator(f"[data-group='{2 * number - 1}']").wait_for()
            driver.communicate(timeout=60)
            first.page.locator(".chip:text-is('killed')").wait_for()  # it recorded no end
            assert first.page.locator("#live").inner_text() == ""
            shutil.rmtree(tmp_path / "live")
            for tab in (first, second):
                tab.page.locator(".problem:has-text('was removed while this page was open')").wait_for()
            second.page.locator(".problem a").click()
            second.page.locator("text=There is no run in this folder yet").wait_for()
            for tab in (first, second):  # requests for the removed run may have had status 404
                tab.problems = [problem for problem in tab.problems if "404" not in problem]
                tab.end(view.url)
    finally:
        driver.kill()
        driver.wait()
