"""Secrets are recognized everywhere in a recipe, no message repeats one, and ordinary settings pass."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.base import secrets
from agentrl.base.secret_forms import hide_logins, is_secret, looks_generated
from agentrl.config import Part, Recipe
from agentrl.errors import RecipeError

ROOT = Path(__file__).parents[2]
RECIPE = Recipe(name="r", policy={"model": "m"}, tasks={"family": "f:g"})  # type: ignore[arg-type]
SAFE = string.ascii_letters + string.digits
PLAIN = st.text(alphabet=SAFE, min_size=3, max_size=40)
GENERATED = st.builds(lambda text, number: f"{text}{number}a1b2c3", st.text(alphabet=SAFE, min_size=12, max_size=40), st.integers(100, 999))

# Places where any text is a secret.
PLANTED: dict[str, Callable[[str], Any]] = {
    "a key": lambda secret: {"api_key": secret},
    "a key of a service": lambda secret: {"openai_key": secret},
    "a key in camel case": lambda secret: {"wandbApiKey": secret},
    "the id of a key": lambda secret: {"aws_access_key_id": secret},
    "a short word for a password": lambda secret: {"db_pass": secret},
    "another": lambda secret: {"smtp-pwd": secret},
    "a cookie": lambda secret: {"cookie": secret},
    "cookies": lambda secret: {"cookies": {"session": secret}},
    "a list of keys": lambda secret: {"api_keys": [secret]},
    "secrets by name": lambda secret: {"secrets": {"a": {"b": secret}}},
    "a token of an unknown service": lambda secret: {"acme_token": secret},
    "deep": lambda secret: {"a": [{"b": {"password": secret}}]},
    "a header": lambda secret: {"headers": {"Authorization": f"Bearer {secret}"}},
    "another header": lambda secret: {"headers": {"X-Api-Key": secret}},
    "a header in a list": lambda secret: {"headers": [f"Authorization: Bearer {secret}"]},
    "a header as a text": lambda secret: {"header": f"X-Auth-Token: {secret}"},
    "a flag": lambda secret: ["p", "--openai-key", secret],
    "a flag with =": lambda secret: ["p", f"--db_pass={secret}"],
    "a flag of one dash": lambda secret: ["p", "-password", secret],
    "a property": lambda secret: ["java", f"-Ddb.password={secret}"],
    "a setting of a program": lambda secret: ["p", f"model.api_key={secret}"],
    "curl -H": lambda secret: ["curl", "-H", f"Authorization: Bearer {secret}", "https://h"],
    "curl -H at once": lambda secret: ["curl", f"-HAuthorization: token {secret}", "https://h"],
    "curl --header=": lambda secret: ["curl", f"--header=Private-Token: {secret}"],
    "curl -H of a cookie": lambda secret: ["curl", "-H", f"Cookie: session={secret}"],
    "curl -u": lambda secret: ["curl", "-u", f"user:{secret}", "https://h"],
    "curl -u at once": lambda secret: ["/usr/bin/curl", f"-uuser:{secret}", "https://h"],
    "curl -su": lambda secret: ["curl", "-su", f"user:{secret}", "https://h"],
    "curl --user=": lambda secret: ["curl", f"--user=user:{secret}", "https://h"],
    "curl --proxy-user": lambda secret: ["curl", "--proxy-user", f"user:{secret}", "https://h"],
    "wget": lambda secret: ["wget", f"--password={secret}", "https://h"],
    "http -a": lambda secret: ["http", "-a", f"user:{secret}", "h"],
    "mysql -p": lambda secret: ["mysql", f"-p{secret}", "db"],
    "sshpass -p": lambda secret: ["sshpass", "-p", secret, "ssh", "h"],
    "env": lambda secret: ["env", f"API_KEY={secret}", "p"],
    "a variable of a container": lambda secret: ["docker", "run", "-e", f"DB_PASSWORD={secret}", "image"],
    "a variable of a container, with =": lambda secret: ["docker", "run", f"--env=GITHUB_TOKEN={secret}", "image"],
    "sh -c": lambda secret: ["sh", "-c", f"curl -u user:{secret} https://h | tee log"],
    "bash -lc": lambda secret: ["bash", "-lc", f"export OPENAI_API_KEY={secret}; p"],
    "ssh": lambda secret: ["ssh", "host", f"p --token '{secret}'"],
    "a command as a text": lambda secret: {"command": f"curl -u user:{secret} https://h"},
    "arguments as a text": lambda secret: {"args": f"--port 80 --auth-token {secret}"},
    "a variable as a text": lambda secret: {"extra": f"API_KEY={secret}"},
    "a URL": lambda secret: {"url": f"https://user:{secret}@h/x"},
    "a URL without a user": lambda secret: {"url": f"redis://:{secret}@h:6379/0"},
    "a URL's query": lambda secret: {"url": f"https://h/x?a=b&access_token={secret}"},
    "Slack's webhook": lambda secret: {"url": f"https://hooks.slack.com/services/T0/B0/{secret}"},
    "Discord's webhook": lambda secret: {"note": f"see https://discord.com/api/webhooks/123/{secret}"},
    "Discord's other webhook": lambda secret: {"x": f"https://discordapp.com/api/v10/webhooks/123/{secret}"},
    "Teams' webhook": lambda secret: {"x": f"https://acme.webhook.office.com/webhookb2/{secret}"},
    "Telegram's bot": lambda secret: {"x": f"https://api.telegram.org/bot123:{secret}/sendMessage"},
    "Zapier's webhook": lambda secret: {"x": f"https://hooks.zapier.com/hooks/catch/123/{secret}"},
    "IFTTT's webhook": lambda secret: {"x": f"https://maker.ifttt.com/trigger/e/with/key/{secret}"},
}
# Places where only text that looks generated is a secret.
PLANTED_GENERATED: dict[str, Callable[[str], Any]] = {
    "an ambiguous key": lambda secret: {"key": secret},
    "another": lambda secret: {"eos_token": secret},
    "a third": lambda secret: {"auth": secret},
    "a text": lambda secret: {"note": f"send Bearer {secret} with it"},
    "a user's own webhook": lambda secret: {"url": f"https://chat.example/hooks/{secret}"},
    "a token before a host": lambda secret: {"url": f"https://{secret}@h/x.git"},
    "a signature": lambda secret: {"url": f"https://h/x?sig={secret}"},
    "the name of a setting": lambda secret: {"a": {f"https://hooks.slack.com/services/T0/B0/{secret}": 1}},
}


def is_rejected(value: Any, secret: str) -> bool:
    """Returns whether a value is rejected, and checks that no message repeats the secret."""
    messages = list(secrets.literal_secret_errors(value, "tasks.family.options"))
    assert all(secret not in message for message in messages), (value, messages)
    return bool(messages)


@given(PLAIN, st.sampled_from(sorted(PLANTED)))
@example("abc", "curl -u")
@example("hunter2", "a short word for a password")
def test_a_secret_is_recognized_by_its_context(text: str, context: str) -> None:
    secret = f"{text}Zq7"
    assert is_rejected(PLANTED[context](secret), secret)


@pytest.mark.parametrize("context", [context for context in PLANTED if context != "a token of an unknown service"])
def test_a_short_secret_is_recognized_too(context: str) -> None:
    assert list(secrets.literal_secret_errors(PLANTED[context]("abc")))


@given(GENERATED, st.sampled_from(sorted(PLANTED_GENERATED)))
def test_a_generated_secret_is_recognized_under_an_ambiguous_name(secret: str, context: str) -> None:
    assert is_rejected(PLANTED_GENERATED[context](secret), secret)


@pytest.mark.parametrize("context", PLANTED)
def test_the_error_for_a_secret_in_a_recipe_does_not_repeat_it(context: str) -> None:
    planted = PLANTED[context]("pLanted7xQ")
    with pytest.raises(RecipeError) as error:
        RECIPE.but({"trackers": [Part("x:y", options={"given": planted})]})
    assert "pLanted7xQ" not in f"{error.value}\n{error.value.fix}" and "trackers.0.options.given" in str(error.value)


@pytest.mark.parametrize("reference", ["$MY_SECRET", "${MY_SECRET}", "<your-secret>"])
def test_a_placeholder_is_no_secret(reference: str) -> None:
    assert [context for context, plant in PLANTED.items() if list(secrets.literal_secret_errors(plant(reference)))] == []


ORDINARY: list[Any] = [
    ["p", "--eos-token", "</s>"],
    ["p", "--eos-token", "END"],
    ["p", "--pad_token=<|endoftext|>", "--bos-token", "[BOS]", "--image-token", "<image>"],
    ["p", "--max-tokens", "5", "--tokenizer", "t", "--num-keys=3", "--token-file", "/run/token", "--password-stdin", "x"],
    ["p", "--no-password", "host", "--use-auth-token", "true"],
    ["docker", "run", "-u", "1000:1000", "-p", "8080:80", "--user", "nobody:nogroup", "-e", "MODE=quiet", "-v", "/a:/b", "image"],
    ["curl", "-s", "-o", "out:put", "-HUser-Agent: x", "-u", "user", "https://h:80/a@b"],
    ["env", "MODE=quiet", "EOS_TOKEN=</s>", "TOKENIZERS_PARALLELISM=false", "API_KEY=$API_KEY", "API_KEY=", "MONKEY=a", "p"],
    ["sh", "-c", 'api_key=$(cat f); export TOKEN="$TOKEN"; curl -H "Authorization: Bearer $TOKEN" -u "$USER:$PASS" https://h'],
    ["sh", "-c", "it's a text whose quotes do not match, with 5 tokens"],
    ["python", "-c", "import os\ntoken=os.environ['T']"],
    ["mysql", "-p", "db", "-h", "host"],
    ["-k", "a@b.c", "--token"],
    ["Content-Type: application/json", "Accept: text/html", "note: x", "User-Agent: a/1"],
    {"eos_token": "</s>", "pad_token": "PAD", "stop_token": "END", "next_page_token": "abc", "think_token": "<think>"},
    {"yes_token": "Yes", "true_token": "true", "answer_token": "A", "step_token": "\u00a7", "score_token": "+", "img_token": "<img_1>"},
    {
        "sort_key": "name",
        "primary_key": "id",
        "answer_key": "answer_2024",
        "key": "value",
        "cache_key": "v2-2024-11-05",
        "keys": ["a", "b"],
    },
    {"max_tokens": 5, "tokens": 100_000, "token": 50_256, "tokenizer": "Qwen/Qwen2.5-7B-Instruct"},
    {"token": "", "api_key": ""},
    {"first_pass": "low", "n_passes": 3, "bypass": "yes", "pass_rate": 0.5, "compass": "north", "passing": "all", "num_pass": "two"},
    {"auth": "none", "authenticate": "later", "author": "me", "login": "shell", "auth_type": "bearer", "pwd": "/work"},
    {
        "secret_santa": "x",
        "password_length": 12,
        "passwords_file": "/x",
        "cookie_path": "/",
        "authorization_url": "https://h/x",
        "dsn_name": "x",
    },
    {"private_key": "~/.ssh/id_ed25519", "secret": "/run/secrets/token.txt", "api_key": "env:API_KEY", "password": "file:/run/x"},
    {"use_auth_token": "true", "require_password": "no", "show_secrets": False, "api_key": None, "password": ""},
    {"prompt": "Solve it.\nThe password: ask the user. Cookie: a sweet. Use --token and Bearer tokens; the key=value pairs are secret."},
    {"prompt": "Basic English, token economy, bearer of news, secret: the answer"},
    {"url": "https://h/a@b"},
    {"url": "http://localhost:8000/v1"},
    {"url": "http://h:80/x@y"},
    {"url": "http://[::1]:80/x@y"},
    {"url": "ssh://git@github.com:22/a/b.git"},
    {"url": "https://h/x?a=b&page_token=abc&key=name&sort=token"},
    {"image": "docker://ubuntu:22.04@sha256:" + "ab" * 32},
    {"model": "meta-llama/Llama-3.2-1B-Instruct", "revision": "a1b2c3d4" * 5, "path": "/models/snapshots/" + "a1b2c3d4" * 5},
    {"site": "https://example.com/webhooks/github", "doc": "https://docs.example.com/hooks/use-effect-and-state"},
    {"note": "mail a@b.c, git@h:r, 3:2, at 10:30@noon"},
]


@pytest.mark.parametrize("value", ORDINARY, ids=str)
def test_ordinary_settings_are_accepted(value: Any) -> None:
    assert not list(secrets.literal_secret_errors(value))
    RECIPE.but({"trackers": [Part("x:y", options={"given": value})]})


LOWERCASE = st.text(alphabet=string.ascii_lowercase, min_size=1, max_size=12)


@given(
    st.dictionaries(
        st.lists(LOWERCASE, min_size=1, max_size=3).map("_".join).filter(lambda name: not is_secret(name, "abc")),
        st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), LOWERCASE, st.lists(LOWERCASE, max_size=3)),
        max_size=5,
    )
)
def test_options_with_plain_words_are_accepted(options: dict[str, Any]) -> None:
    assert not list(secrets.literal_secret_errors(options))


def test_all_defaults_and_shipped_recipes_are_accepted() -> None:
    assert not list(secrets.literal_secret_errors(RECIPE.model_dump(mode="json")))
    for file in sorted((ROOT / "recipes").glob("*.py")):
        assert not list(secrets.literal_secret_errors(file.read_text(), file.name))


URL_PASSWORDS = st.text(alphabet=SAFE + "@:/?#!$%&*+-.=_~", min_size=1, max_size=40).filter(lambda text: "://" not in f"{text}/")


@given(URL_PASSWORDS, st.sampled_from(["", " and more", '"}', "/path", "/path?x=1", ":5432/db"]))
@example("p@ss", "/path")
@example("p@ss/w@rd", "/path")
def test_every_character_of_a_password_in_a_url_is_hidden(password: str, after: str) -> None:
    text = f"failed: postgres://me:q{password}q@db.example{after}"
    assert hide_logins(text, "[x]") == f"failed: postgres://[x]@db.example{after}"
    assert secrets.redact(secrets.redact(text)) == f"failed: postgres://{secrets.HIDDEN}@db.example{after}"


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_texts_without_urls_are_not_changed(text: str) -> None:
    assert hide_logins(text.replace("://", ""), "[x]") == text.replace("://", "")


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "text", ["://" * 100_000, "http://a:" * 50_000, "https://hooks/" + "a/" * 100_000, "Bearer " * 100_000, "@" * 300_000]
)
def test_hostile_texts_are_searched_in_linear_time(text: str) -> None:
    hide_logins(text, "[x]")
    list(secrets.literal_secret_errors({"x": text, "args": text}))


def test_parts_of_a_secret_that_was_read_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_read", set())
    secrets.register("postgres://me:pl%40nted-pass@h:5432/db")
    secrets.register("https://hooks.slack.com/services/T0/B0/a1b2c3d4e5f6a7b8c9")
    for text in ("login failed with pl%40nted-pass", "login failed with pl@nted-pass", "POST /services/T0/B0/a1b2c3d4e5f6a7b8c9 404"):
        redacted = secrets.redact(text)
        assert secrets.HIDDEN in redacted and "nted-pass" not in redacted and "a1b2" not in redacted
    assert secrets.redact("h:5432/db and /services/T0") == "h:5432/db and /services/T0"


@pytest.mark.parametrize("secret", ["quo'te\"d\\back", "tab\tinside it", "pl@n/ted?x=1", "ünï-cödé"])
def test_a_secret_that_was_read_is_hidden_in_every_notation(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from urllib.parse import quote

    monkeypatch.setattr(secrets, "_read", set())
    secrets.register(secret)
    for form in (secret, json.dumps(secret), repr(secret), quote(secret, safe=""), quote(secret)):
        assert secrets.HIDDEN in secrets.redact(f"it is {form}.")


def test_child_processes_get_no_value_that_contains_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_read", set())
    secrets.register("planted-value-7")
    leaky = {
        "ALERTS": "https://hooks.slack.com/services/T0/B0/abc",
        "OPTIONS": "--verbose --with planted-value-7",
        "SESSION_COOKIE": "a=b",
        "MIRROR": "https://h/simple?token=abc",
    }
    assert secrets.child_environment(leaky | {"PATH": "/bin", "INDEX": "https://h/simple"}) == {"PATH": "/bin", "INDEX": "https://h/simple"}


def test_references_are_resolved_in_the_places_where_secrets_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_read", set())
    monkeypatch.setenv("MINE", "planted-value-7")
    options = {
        "openai_key": "env:MINE",
        "api_keys": ["env:MINE"],
        "cookies": {"session": "env:MINE"},
        "my_key": "env:MINE",
        "a": {"db_pass": "env:MINE"},
        "note": "env:MINE",
    }
    assert not list(secrets.literal_secret_errors(options))
    secret = "planted-value-7"
    assert secrets.resolve_options(options) == {
        "openai_key": secret,
        "api_keys": [secret],
        "cookies": {"session": secret},
        "my_key": secret,
        "a": {"db_pass": secret},
        "note": "env:MINE",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("123e4567-e89b-12d3-a456-426614174000", True),
        ("a1b2c3d4e5f6a7b8c9d0", True),
        ("Qwen2.5-7B-Instruct-2024", False),
        ("2024-11-05T10:30:00", False),
        ("abcdefghijklmnopqrstuvwxyz", False),
        ("12345678901234567890", False),
        ("/models/a1b2c3d4e5f6a7b8c9d0", False),
    ],
)
def test_looks_generated(text: str, expected: bool) -> None:
    assert looks_generated(text) is expected


@pytest.mark.parametrize("override", ["tasks.family.options.api_key pLanted7xQ", "API_KEY:pLanted7xQ", "mcp=--token pLanted7xQ"])
def test_the_error_for_a_wrong_override_repeats_no_recognized_secret(override: str) -> None:
    with pytest.raises(RecipeError) as error:
        RECIPE.but(override.replace("pLanted7xQ", "https://u:pLanted7xQ@h"))
    assert "pLanted7xQ" not in str(error.value)
