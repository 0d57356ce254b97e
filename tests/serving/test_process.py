"""How the server process starts and ends under failures. Each test starts a separate process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.errors import ServingError
from agentrl.serving import VLLMServer
from agentrl.testing.tiny_model import make_model, write_version
from tests.serving.conftest import RECIPE
from tests.serving.test_supervisor import group_members, shared_memory
from tests.waiting import until, wait_until

pytestmark = pytest.mark.vllm

DRIVER = """
import asyncio, sys
from pathlib import Path
from agentrl.serving import VLLMServer
from tests.serving.conftest import RECIPE

async def main(run_dir):
    server = VLLMServer(recipe=RECIPE, model=run_dir / "versions/0", version=0, run_dir=run_dir)
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_server_and_engine_die_with_the_driver(tmp_path: Path) -> None:
    write_version(tmp_path, 0, make_model(seed=0))
    root = Path(__file__).parents[2]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        server = int(driver.stdout.readline())
        assert len(group_members(server)) >= 2  # the API server and its engine
        shared = shared_memory(server)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait(60)
    wait_until(lambda: not group_members(server))
    wait_until(lambda: not any(path.exists() for path in shared))


async def test_a_failed_start_reports_its_cause(tmp_path: Path) -> None:
    version = write_version(tmp_path, 0, make_model(seed=0))
    config = tmp_path / version.folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["NoSuchModel"], "model_type": "no_such"}))
    server = VLLMServer(recipe=RECIPE, model=tmp_path / version.folder, version=0, run_dir=tmp_path)
    with pytest.raises(ServingError, match=r"exited with code \d+ while starting: The checkpoint .* model type `no_such`") as error:
        await server.start()
    assert str(server.log_path) in str(error.value) and len(str(error.value)) < 1000
    assert server.pid is None


async def test_a_start_past_its_deadline_leaves_no_process(tmp_path: Path) -> None:
    version = write_version(tmp_path, 0, make_model(seed=0))
    serving = RECIPE.serving.model_copy(update={"startup_timeout_s": 3.0})
    recipe = RECIPE.model_copy(update={"serving": serving})
    server = VLLMServer(recipe=recipe, model=tmp_path / version.folder, version=0, run_dir=tmp_path)
    task = asyncio.create_task(server.start())
    await until(lambda: server.pid is not None or task.done())
    pid = server.pid
    assert pid is not None
    with pytest.raises(ServingError, match="not ready after 3 s"):
        await task
    assert group_members(pid) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)
