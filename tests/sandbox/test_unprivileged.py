"""Bubblewrap without root, run as another user even if the tests run as root.

The tests are forked from this process and become `nobody`. They keep the right to read root's files (this interpreter, this code), which no
program that they start inherits.
"""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import traceback
from pathlib import Path

import pytest

from agentrl.sandbox import images, select_backend
from agentrl.sandbox.conformance import CHECKS, check_conformance
from agentrl.sandbox.inside.users import PR_SET_KEEPCAPS, prctl, set_capabilities
from benchmarks.sandbox_spin import KINDS, SCORED, spun
from tests.sandbox.building import SPEC

NOBODY, CAP_DAC_READ_SEARCH = 65534, 2
FORKED_S = 600
pytestmark = [
    pytest.mark.bubblewrap,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user; without root the other tests check this"),
]


@pytest.fixture(scope="module")
def folder_of_nobody():
    """A folder of the user `nobody`, with the image's tree in its own cache."""
    with tempfile.TemporaryDirectory(prefix="agentrl-nobody-", dir="/tmp") as folder:
        root = Path(folder)
        root.chmod(0o755)
        (root / "image").mkdir()
        (root / "image" / "image.toml").write_text('suite = "bookworm"\npackages = ["python3"]\n')
        image = images.load_image(root / "image")
        images.ensure_rootfs(image)
        (root / "cache" / "images").mkdir(parents=True)
        copy = root / "cache" / image.folder.relative_to(image.folder.parents[1])
        subprocess.run(["cp", "-a", "--reflink=auto", image.folder, copy], check=True)
        for path in (root, root / "image", root / "cache", root / "cache" / "images", copy):
            os.chown(path, NOBODY, NOBODY)
        yield root
        shutil.rmtree(f"/tmp/agentrl-{NOBODY}", ignore_errors=True)


def as_nobody(folder_of_nobody, coroutine_function):
    """Runs the coroutine function `coroutine_function` as another user, and returns its result through JSON."""
    result_file = folder_of_nobody / "answer"
    result_file.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            os.environ.update(AGENTRL_CACHE=str(folder_of_nobody / "cache"), HOME=str(folder_of_nobody), TMPDIR=str(folder_of_nobody))
            os.environ.pop("XDG_RUNTIME_DIR", None)
            os.setgroups([])
            prctl(PR_SET_KEEPCAPS, 1)
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            set_capabilities([CAP_DAC_READ_SEARCH])
            result_file.write_text(json.dumps({"ok": asyncio.run(asyncio.wait_for(coroutine_function(), FORKED_S))}))
        except BaseException:
            result_file.write_text(json.dumps({"failed": traceback.format_exc()}))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    outcome = json.loads(result_file.read_text())
    assert "failed" not in outcome, outcome["failed"]
    return outcome["ok"]


async def with_backend(folder_of_nobody, function):
    backend = select_backend("bubblewrap", run_label="test", root=folder_of_nobody)
    try:
        await backend.prepare(SPEC)
        return await function(backend)
    finally:
        await backend.close()


def test_conformance_without_root(folder_of_nobody):
    async def failed_checks(backend):
        assert os.geteuid() == NOBODY and backend._groups is None
        return [(result.name, result.detail) for result in await check_conformance(backend, SPEC) if not result.ok]

    assert as_nobody(folder_of_nobody, lambda: with_backend(folder_of_nobody, failed_checks)) == []
    assert len(CHECKS) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_spinning_programs_get_a_result_without_root(folder_of_nobody, kind):
    async def spin(backend):
        outcome = await spun(backend, SPEC, kind, count=4, seconds=1.5)
        return [sorted(outcome.ends), dict(outcome.after), outcome.neighbour]

    ends, after, neighbour = as_nobody(folder_of_nobody, lambda: with_backend(folder_of_nobody, spin))
    assert set(ends) <= SCORED[kind] and after == {"answers": 4} and neighbour == ""
