"""Secrets are given by reference, and no file or output of a run contains one."""

from __future__ import annotations

import json
import logging
import os
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.base import secrets, user_code
from agentrl.base.files import is_private, make_private, write_atomically
from agentrl.config import MCPConfig, Part, Recipe
from agentrl.errors import RecipeError, UserError
from agentrl.learner.process import LearnerProcess
from agentrl.protocols.cluster import PYTHON
from agentrl.reward.worker import SubprocessWorker
from tests.serving.test_server import Small

PLANTED = "pLanted7Secret/with+chars=9"
RECIPE = Recipe(name="r", policy={"model": "m"}, tasks={"family": "f:g"})  # type: ignore[arg-type]
GITHUB, OPENAI, AWS = "ghp_" + "a1" * 18, "sk-" + "b2" * 16, "AKIA" + "A1" * 8


@pytest.fixture(autouse=True)
def forget_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_read", set())
    secrets._in_environment.cache_clear()


def test_a_reference_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", PLANTED)
    (tmp_path / "token").write_text(f"{PLANTED}-2\r\n")
    assert secrets.read_secret("env:MINE") == PLANTED
    assert secrets.read_secret(f"file:{tmp_path}/token") == f"{PLANTED}-2"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert secrets.read_secret("file:~/token") == f"{PLANTED}-2"


@pytest.mark.parametrize(
    "reference", ["env:", "env:A B", "env:1A", "file:", "file:relative", "file:a\0", PLANTED, "", "ENV:MINE", "env:MINE\n"]
)
def test_the_error_for_an_invalid_reference_does_not_repeat_it(reference: str) -> None:
    with pytest.raises(UserError, match="given by value") as error:
        secrets.read_secret(reference)
    assert PLANTED not in str(error.value) and "env:NAME" in error.value.fix


def test_a_missing_secret_is_an_error_that_names_its_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY", " ")
    for name, content in {"empty": b"\n", "binary": b"\xff\xfe", "huge": b"x" * (1 << 17), "nul": b"a\0b"}.items():
        (tmp_path / name).write_bytes(content)
    for reference in (
        "env:EMPTY",
        "env:NOT_THERE",
        *(f"file:{tmp_path}/{name}" for name in ("empty", "binary", "huge", "nul", "gone", ".")),
    ):
        with pytest.raises(UserError, match=reference.partition(":")[2].rstrip(".")) as error:
            secrets.read_secret(reference)
        assert error.value.fix


RECIPES_WITH_SECRETS = {
    "trackers.0.options.api_key": {"trackers": [Part("x:y", options={"api_key": PLANTED})]},
    "trackers.1.options.login.password": {"trackers": ["terminal", Part("x:y", options={"login": {"password": PLANTED}})]},
    "trackers.0.options.wandbApiKey": {"trackers": [{"ref": "x:y", "options": {"wandbApiKey": PLANTED}}]},
    "store.options.url": {"store": "x:y", "store.options": {"url": f"redis://:{PLANTED.replace('/', '')}@h:6379/0"}},
    "store.options.auth_token": {"store": "x:y", "store.options": {"auth_token": PLANTED}},
    "tasks.family.options.token": {"tasks": {"family": {"ref": "f:g", "options": {"token": PLANTED}}}},
    "tasks.family.options.note": {"tasks": {"family": {"ref": "f:g", "options": {"note": GITHUB}}}},
    "sandbox.backend.options.keys": {"sandbox.backend.options.keys": [AWS], "sandbox.backend": "x:y"},
    "policy.model": {"policy": {"model": f"https://user:{OPENAI}@models.example/m"}},
    "mcp.it.host_command": {"mcp": {"it": {"host_command": ["p", "--api-key", PLANTED]}}},
    "mcp.it.command": {"mcp": {"it": {"command": ["p", f"--github-access-token={PLANTED}"]}}},
    "mcp.it: env.TOKEN": {"mcp": {"it": {"host_command": ["p"], "env": {"TOKEN": PLANTED}}}},
    "mcp.it: url has a query": {"mcp": {"it": {"url": f"https://h/mcp?k={PLANTED.replace('/', '')}"}}},
    "mcp.it.url": {"mcp": {"it": {"url": f"https://u:{PLANTED.replace('/', '')}@h/mcp"}}},
    "mcp.it.key_env": {"mcp": {"it": {"url": "https://h/mcp", "key_env": f"{OPENAI}"}}},
    "mcp.it.env.A": {"mcp": {"it": {"host_command": ["p"], "env": {"A": 90817263544536271}}}},
}


@pytest.mark.parametrize("location", RECIPES_WITH_SECRETS)
def test_the_error_for_a_recipe_with_a_secret_names_the_key_and_not_the_secret(location: str) -> None:
    with pytest.raises(RecipeError) as error:
        RECIPE.but(RECIPES_WITH_SECRETS[location])
    message = f"{error.value}\n{error.value.fix}"
    assert location in message, message
    for secret in (PLANTED, PLANTED.replace("/", ""), GITHUB, OPENAI, AWS, "90817263544536271"):
        assert secret not in message


def test_the_error_of_a_section_does_not_repeat_a_secret() -> None:
    with pytest.raises(ValidationError) as error:
        MCPConfig(host_command=("p",), env={"TOKEN": PLANTED})
    assert PLANTED not in str(error.value) and "env.TOKEN is given by value" in str(error.value) and "env:NAME" in str(error.value)
    with pytest.raises(ValidationError, match="the agent could read the environment of a program"):
        MCPConfig(command=("p",), env={"TOKEN": "env:TOKEN"})


def test_ordinary_recipes_are_accepted() -> None:
    plain: dict[str, Any] = {
        "tasks": {
            "family": Part(
                "f:g", options={"eos_token": "<|im_end|>", "max_tokens": 5, "tokenizer": "t", "url": "https://h/a@b", "token": ""}
            )
        },
        "mcp": {"it": {"host_command": ["p", "--max-tokens", "5", "-k", "a@b.c", "--token"], "env": {"T": "env:T", "F": "file:/t"}}},
        "trackers": [Part("x:y", options={"api_key": "env:WANDB_API_KEY"})],
    }
    assert RECIPE.but(plain).mcp["it"].env == {"T": "env:T", "F": "file:/t"}
    for file in sorted((Path(__file__).parents[2] / "recipes").glob("*.py")):
        assert not list(secrets.literal_secret_errors(file.read_text(), file.name))


def test_references_in_options_of_parts_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", PLANTED)
    options = {"api_key": "env:MINE", "note": "env:MINE", "login": {"password": "env:MINE", "user": "u"}, "n": 3}
    assert secrets.resolve_options(options) == {"api_key": PLANTED, "note": "env:MINE", "login": {"password": PLANTED, "user": "u"}, "n": 3}
    with pytest.raises(UserError, match="the environment variable GONE contains no secret"):
        secrets.resolve_options({"token": "env:GONE"})


TEXTS = st.text(alphabet=string.printable, max_size=80)
SECRETS = st.text(alphabet=string.printable, min_size=6, max_size=60).filter(lambda text: text.strip() and not {"[", "]"} & {*text})


@given(secret=SECRETS, before=TEXTS, after=TEXTS, escaped=st.booleans())
def test_a_secret_that_was_read_is_redacted_from_any_text(secret: str, before: str, after: str, escaped: bool) -> None:
    secrets._read.clear()
    secrets.register(secret)
    form = json.dumps(secret)[1:-1] if escaped else secret
    redacted = secrets.redact(before + form + after)
    assert secrets.HIDDEN in redacted and (secret not in redacted or secret in secrets.HIDDEN)


def test_passwords_in_urls_and_environment_keys_are_hidden(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    key = "q9" * 12
    monkeypatch.setenv("SOME_API_KEY", key)
    secrets._in_environment.cache_clear()
    error = ConnectionError(f"407 from http://user:p4ss@proxy:3128/x for {key}")
    description = user_code.describe_error(error)
    assert description == f"ConnectionError: 407 from http://{secrets.HIDDEN}@proxy:3128/x for {secrets.HIDDEN}"
    assert secrets.redact("mail a@b.c, http://h/x@y, git@h:r") == "mail a@b.c, http://h/x@y, git@h:r"
    try:
        raise error
    except ConnectionError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "it failed", None, sys.exc_info())
    text = secrets.RedactingFormatter("%(message)s").format(record)
    assert "Traceback" in text and "p4ss" not in text and key not in text


def test_child_processes_that_need_no_secret_get_none() -> None:
    secrets.register("value-known")
    with_secrets = {
        "OPENAI_API_KEY": "x",
        "HF_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "DB_PASSWORD": "x",
        "https_proxy": "http://u:p@h:1",
        "DATABASE_URL": "postgres://u:p@h/d",
        "INNOCENT": "value-known",
        "NOTE": GITHUB,
    }
    without_secrets = {
        "PATH": "/bin",
        "PWD": "/",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "0",
        "http_proxy": "http://h:1",
        "HF_HOME": "/h",
    }
    assert secrets.child_environment(with_secrets | without_secrets) == without_secrets


SERVES = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
print(json.dumps(dict(os.environ)), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def environment_of(request: Any) -> dict[str, str]:
    """Returns the environment of the verifier's process."""
    return dict(os.environ)


class ShowingLearner(LearnerProcess):
    """A learner that prints its environment."""

    def _command(self, placement: str) -> list[str]:
        return [PYTHON, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]


@pytest.mark.slow
async def test_servers_learners_and_workers_get_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", PLANTED)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{PLANTED.replace('/', '')}@proxy.example:3128")
    server = Small(tmp_path, SERVES)
    await server.start()
    try:
        (line,) = [line for line in server.log_path.read_text().splitlines() if line.startswith("{")]
    finally:
        await server.stop()
    server_environment = json.loads(line)
    assert server_environment["AGENTRL_SERVER_KEY"] == server.key and "PATH" in server_environment
    learner_process = ShowingLearner(tmp_path, RECIPE)
    await learner_process.start()
    await learner_process.wait(timeout_s=60)
    learner_environment = json.loads(learner_process.log_tail())
    worker = SubprocessWorker(environment_of)
    try:
        worker_environment = worker.call_blocking(None)
    finally:
        worker.close()
    for environment in (server_environment, learner_environment, worker_environment):
        assert "PATH" in environment and not {"MY_TOKEN", "HTTPS_PROXY"} & {*environment}
        assert not any(secret in value for value in environment.values() for secret in (PLANTED, PLANTED.replace("/", "")))


def test_files_of_a_private_folder_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "open.log").write_text("x")
    for path in (folder, folder / "logs"):
        path.chmod(0o755)
    (folder / "logs" / "open.log").chmod(0o644)
    (folder / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").write_text("x")
    (tmp_path / "outside").chmod(0o644)
    make_private(folder)
    write_atomically(folder / "new.json", "{}")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert modes == {"run": 0o700, "logs": 0o700, "open.log": 0o600, "new.json": 0o600, "link": 0o644}
    assert is_private(folder) and not is_private(tmp_path / "outside")
    write_atomically(tmp_path / "key", "k", private=True)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_errors_on_the_command_line_repeat_no_secret(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.py"
    override = f'mcp.it={{"host_command": ["p"], "env": {{"TOKEN": "{PLANTED}"}}}}'
    command = [sys.executable, "-m", "agentrl", "train", str(recipe), override, "--run-dir", str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2 and "env.TOKEN is given by value" in result.stderr
    assert PLANTED not in result.stdout + result.stderr and not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--api_key", "--api-key", "--Api-Key", "--access_token", "--TOKEN"])
def test_a_flag_is_recognized_in_every_spelling(flag: str) -> None:
    assert list(secrets.literal_secret_errors({"args": [flag, "abc"]}))
    assert list(secrets.literal_secret_errors({"args": [f"{flag}=abc"]}))


@pytest.mark.parametrize("name", ["PGPASSWORD", "DBPASSWORD", "DB_PASS", "API_KEYS", "SECRETS", "AZURE_STORAGE_CONNECTION_STRING"])
def test_more_secret_variables_are_withheld_from_child_processes(name: str) -> None:
    assert secrets.child_environment({name: "abcdef", "MONKEY": "a", "MAX_TOKENS": "5", "BYPASS_CACHE": "1"}) == {
        "MONKEY": "a",
        "MAX_TOKENS": "5",
        "BYPASS_CACHE": "1",
    }


@pytest.mark.parametrize("key", ["passwords", "api_keys", "secrets", "secret_token", "wandb_token"])
def test_more_keys_are_recognized_as_secrets(key: str) -> None:
    assert list(secrets.literal_secret_errors({key: "abc"}))
    assert not list(secrets.literal_secret_errors({"eos_token": "</s>", "max_tokens": "5", "tokenizer": "abc"}))


def test_a_secret_of_more_than_64_kib_raises_instead_of_being_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    for content in ("a" + "\u00e9" * (33 << 10), "a" * (64 << 10) + "\nmore"):
        path.write_text(content)
        with pytest.raises(UserError, match="larger than 64 KiB"):
            secrets.read_secret(f"file:{path}")
    monkeypatch.setenv("MINE", "\u00e9" * (33 << 10))
    with pytest.raises(UserError, match="MINE contains no secret"):
        secrets.read_secret("env:MINE")


def test_a_secret_is_read_in_a_locale_without_utf8(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes("p\u00e4ssword".encode())
    code = f"from agentrl.base import secrets; print(ascii(secrets.read_secret('file:{path}')))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    read = subprocess.run([sys.executable, "-c", code], env=os.environ | locale, capture_output=True, text=True, check=True)
    assert read.stdout == "'p\\xe4ssword'\n"
