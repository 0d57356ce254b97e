"""Only the driver and the learner of a run may use its servers: every route rejects a local user without the key."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from agentrl.errors import ServingError
from agentrl.protocols.cluster import HOST, PORT, SCRATCH
from agentrl.serving import access
from agentrl.serving.control import ControlPlane
from tests.serving.conftest import Served

# Prints vLLM's table of routes, including those outside its OpenAPI document, for our arguments.
ROUTES = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from agentrl.serving import access
access.load_key()
args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
found = []
def walk(routes, prefix=""):
    for route in routes:
        path = prefix + getattr(route, "path", "")
        methods = sorted(getattr(route, "methods", None) or ())
        found.extend((method, path) for method in methods or ["GET", "POST"])
        if hasattr(route, "routes") and route.routes:
            walk(route.routes, path)
walk(build_app(args, ("generate", "embed", "classify")).routes)
print("ROUTES" + json.dumps(sorted(set(found))))
"""


async def answer(app: Any, path: str, *, method: str = "GET", kind: str = "http", headers: list[tuple[bytes, bytes]] | None = None) -> Any:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app({"type": kind, "method": method, "path": path, "headers": headers or []}, None, send)
    return sent[0].get("status", sent[0]["type"])


async def passed(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "passed", "status": 200})


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> access.RequireKey:
    monkeypatch.setattr(access, "_expected", b"")
    monkeypatch.setenv(access.KEY_VARIABLE, "the key")
    access.load_key()
    return access.RequireKey(passed)


BEARER = b"Bearer the key"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([(b"authorization", BEARER)], 200),
        ([(b"Authorization", b"bearer the key")], 200),
        ([(b"authorization", b"the key")], 401),
        ([(b"authorization", b"Basic the key")], 401),
        ([(b"authorization", b"Bearer the ke")], 401),
        ([(b"authorization", b"Bearer the key ")], 401),
        ([(b"authorization", b"Bearer ")], 401),
        ([(b"authorization", b"Bearer \xff\xfe")], 401),
        ([(b"authorization", BEARER), (b"authorization", b"Bearer x")], 401),
        ([(b"x-api-key", b"the key")], 401),
    ],
)
async def test_a_request_needs_the_key(guard: access.RequireKey, headers: list[tuple[bytes, bytes]], status: int) -> None:
    for path in ("/collective_rpc", "/v1/completions", "/", "/health/", "//health", "/health/../pause", "/metrics"):
        assert await answer(guard, path, headers=headers) == status
    for method in ("OPTIONS", "HEAD", "POST"):
        assert await answer(guard, "/health", method=method, headers=headers) == status
    assert await answer(guard, "/health") == 200
    assert await answer(guard, "/v1/realtime", kind="websocket", headers=headers) == (200 if status == 200 else "websocket.close")
    assert await answer(guard, "/health", kind="websocket", method="", headers=headers) == (200 if status == 200 else "websocket.close")


async def test_lifespan_messages_pass(guard: access.RequireKey) -> None:
    assert await answer(guard, "", kind="lifespan") == 200


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_expected", b"")
    monkeypatch.delenv(access.KEY_VARIABLE, raising=False)
    with pytest.raises(KeyError):
        access.load_key()
    with pytest.raises(RuntimeError, match="without a key, any local user could replace the server's weights"):
        access.RequireKey(passed)


def test_children_do_not_inherit_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_expected", b"")
    monkeypatch.setenv(access.KEY_VARIABLE, "the key")
    access.load_key()
    environment = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    assert "the key" not in environment and access.KEY_VARIABLE not in environment


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="session")
async def test_a_real_server_requires_the_key_on_every_route(served: Served) -> None:
    arguments = [text.replace(HOST, "127.0.0.1").replace(PORT, "1") for text in served.server._command()]
    command = [sys.executable, "-c", ROUTES, *arguments[arguments.index("--") + 1 :]]
    server_variables = {name: text.replace(SCRATCH, "/tmp") for name, text in served.server._environment().items()}
    variables = {**os.environ, **server_variables, access.KEY_VARIABLE: "another"}
    process = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    routes = [tuple(route) for route in json.loads(process.stdout.partition("ROUTES")[2])]
    url, key = served.server.url, served.server.key
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        document = http.get("/openapi.json", headers=access.auth_headers(key)).raise_for_status().json()
        documented = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
        assert documented <= {*routes} and len(routes) > 40
        dangerous = {"/collective_rpc", "/update_weights", "/pause", "/resume", "/init_weight_transfer_engine", "/inference/v1/generate"}
        assert dangerous <= {path for _, path in routes} and dangerous - {"/inference/v1/generate"} <= {path for _, path in documented}
        opened = []
        for method, path in [*routes, ("GET", "/nothing/there"), ("OPTIONS", "/pause"), ("POST", "/metrics/"), ("GET", "//pause")]:
            for headers in ({}, access.auth_headers("wrong"), {"x-api-key": key}):
                response = http.request(method, path, headers=headers, json={"method": "shutdown"} if method == "POST" else None)
                if response.status_code != 401:
                    opened.append((method, path, response.status_code))
    assert set(opened) == {("GET", "/health", 200)}
    # No request had an effect: the server samples, and its version is unchanged.
    assert (await served.generate([1, 2, 3], max_tokens=2)).token_ids
    with_wrong_key = ControlPlane(url, key="wrong")
    try:
        for call in (with_wrong_key.pause(), with_wrong_key.reload("/tmp", 7), with_wrong_key.generate({}, timeout_s=5)):
            with pytest.raises(ServingError, match="returned status 401"):
                await call
        assert await with_wrong_key.health(timeout_s=5) == "answers", "the health route needs no key"
    finally:
        await with_wrong_key.close()


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="session")
async def test_the_key_is_in_no_command_line_and_no_log(served: Served) -> None:
    key = served.server.key.encode()
    commands = {}
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands[int(process.parent.name)] = process.read_bytes()
    assert served.server.pid in commands and not [pid for pid, command in commands.items() if key in command]
    files = [file for file in served.server.run_dir.rglob("*") if file.is_file()]
    assert served.server.log_path in files and not [file for file in files if key in file.read_bytes()]


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="session")
async def test_a_real_server_listens_on_loopback_only(served: Served) -> None:
    assert served.server.pid is not None
    processes = [psutil.Process(served.server.pid), *psutil.Process(served.server.pid).children(recursive=True)]
    listening = {entry.laddr.ip for p in processes for entry in p.net_connections("inet") if entry.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
