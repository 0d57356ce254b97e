"""A run uses planted secrets, and its tools and servers repeat them. No file of the run contains one."""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agentrl.base import secrets
from agentrl.config import SandboxConfig
from agentrl.evaluation.open_policy import prepare_evaluation
from agentrl.evaluation.policies import find_policy
from agentrl.evaluation.suites import evaluate_suites
from agentrl.failure.case import load_suite
from agentrl.records import SandboxSpec
from agentrl.sandbox.select import open_backend
from agentrl.testing import ChatServer, ScriptedAnswer
from tests.evaluation.suite_parts import make_case, make_suite
from tests.evaluation.test_chat_agent import QUICK, SUBMIT, says

TOKEN, KEY, FILE_TOKEN = "tok-7Zq/planted+token=1", "key-8Yr-planted-key-2", 'file-9Xs"planted\\token-3'
# An MCP server that repeats its secrets in an answer, an error, an address and on standard error.
LEAKS = """
import json, os, sys
token, other = os.environ["TOKEN"], os.environ["OTHER"]
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    result = {"protocolVersion": request.get("params", {}).get("protocolVersion")}
    if request["method"] == "initialize":
        result |= {"capabilities": {"tools": {}}, "serverInfo": {"name": "leaks", "version": "1"}}
    elif request["method"] == "tools/list":
        result = {"tools": [{"name": "tell", "inputSchema": {"type": "object", "properties": {"way": {"type": "string"}}}}]}
    elif request["params"]["arguments"].get("way") == "dies":
        sys.exit(f"Unauthorized: {token} {other} at https://me:{token}@api.example")
    else:
        error = request["params"]["arguments"].get("way") == "fails"
        text = f"{token} {other} {json.dumps(other)} https://me:p4ssw0rd@api.example postgres://me:ha1f@h1dden/now@db.example/x"
        text += " https://hooks.slack.com/services/T0/B0/w3bh00k"
        result = {"content": [{"type": "text", "text": text}], "isError": error}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("refused", [False, True])
async def test_no_file_of_a_run_contains_a_planted_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    monkeypatch.setattr(secrets, "_read", set())
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "leaks.py").write_text(LEAKS)
    outside = tmp_path.parent / f"{tmp_path.name}-token"
    outside.write_text(f"{FILE_TOKEN}\n")
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    monkeypatch.setenv("THEIR_KEY", KEY)
    case = make_case("good")
    case = replace(case, task=replace(case.task, tools=("mcp:leaks", *case.task.tools)))
    suite = make_suite(tmp_path / "s", case)
    server = {
        "host_command": [sys.executable, "leaks.py"],
        "env": {"TOKEN": "env:MY_TOKEN", "OTHER": f"file:{outside}"},
    }
    overrides = (*QUICK, f"mcp.leaks={json.dumps(server)}")
    answered = says(f"look {KEY}", *(("tell", json.dumps({"way": way})) for way in ("says", "fails")))
    turns = [answered, says("again", ("tell", json.dumps({"way": "dies"}))), answered, SUBMIT]  # a dead program costs the attempt
    command_lines: list[str] = []
    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(stop, command_lines))
    watcher.start()
    try:
        answers = [ScriptedAnswer(status=401, raw=f"no such key: {KEY}".encode())] if refused else turns
        with ChatServer(answers) as chat:
            policy = find_policy(chat.url, model_name="theirs", key_env="THEIR_KEY")
            with prepare_evaluation(policy, [load_suite(suite.folder)], overrides=overrides) as evaluation:
                (result,) = await evaluate_suites(evaluation, console=False)
        assert chat.requests[0]["headers"]["authorization"] == f"Bearer {KEY}"
    finally:
        stop.set()
        watcher.join()
    if not refused:
        (body,) = (request["body"] for request in chat.requests[1:2])
        tool_outputs = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        assert len(tool_outputs) == 2 and all(secrets.HIDDEN in text for text in tool_outputs), tool_outputs
    run = evaluation.start.folder
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert result.outcomes and {run / "recipe.json", run / "run.json"} <= {*files} and any(path.suffix == ".sqlite" for path in files)
    captured = capfd.readouterr()
    texts = {**files, "output": (captured.out + captured.err + caplog.text).encode(), "command lines": "\n".join(command_lines).encode()}
    for source, content in texts.items():
        for secret in (TOKEN, KEY, FILE_TOKEN, "p4ssw0rd", "ha1f", "h1dden", "w3bh00k"):
            forms = (secret, json.dumps(secret)[1:-1], base64.b64encode(secret.encode()).decode())
            assert not any(form.encode() in content for form in forms), (source, secret)
    modes = {path.stat().st_mode & 0o077 for path in (run, *run.rglob("*")) if not path.is_symlink()}
    assert modes == {0}, "the run folder is private to this user"


def watch(stop: threading.Event, command_lines: list[str]) -> None:
    """Collects the command lines of the child processes of this process."""
    while not stop.is_set():
        for child in psutil.Process().children(recursive=True):
            try:
                command_lines.append(" ".join(child.cmdline()))
            except psutil.Error:
                continue
        time.sleep(0.02)


@pytest.mark.parametrize(
    "backend", [pytest.param("bubblewrap", marks=pytest.mark.bubblewrap), pytest.param("docker", marks=pytest.mark.docker)]
)
async def test_a_sandbox_has_no_environment_variable_of_the_run(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    monkeypatch.setenv("INNOCENT_NAME", KEY)
    config = SandboxConfig(backend=backend, max_open=1)
    sandboxes = open_backend(config, run_label="planted", root=Path(__file__).parents[2])
    try:
        spec = SandboxSpec(image="sandboxes/tables")
        await sandboxes.prepare(spec)
        sandbox = await sandboxes.open(spec)
        command = "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'"
        result = await sandbox.exec(["sh", "-c", command], timeout_s=20, output_bytes=1 << 20)
        assert "PATH=" in result.stdout and TOKEN not in result.stdout and KEY not in result.stdout
    finally:
        await sandboxes.close()
