from __future__ import annotations

import time
from pathlib import Path

import pytest

from agentrl.agent.template import MAX_BYTES, SHIPPED, read_template, try_template
from agentrl.errors import UserError

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LATE = "{% if messages|length > 4 %}" + LOOPS + "{% endif %}"


def test_a_word_names_a_shipped_template_and_anything_else_a_file(tmp_path: Path) -> None:
    for word in SHIPPED:
        assert "for message in messages" in read_template(word, tmp_path)
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert read_template("mine.jinja", tmp_path) == read_template(str(tmp_path / "mine.jinja"), Path("/")) == "{{ messages }}"
    (tmp_path / "hermes").write_text("a file of that name")
    assert read_template("./hermes", tmp_path) == "a file of that name" != read_template("hermes", tmp_path)


@pytest.mark.parametrize("name", ["herms", "absent/file.jinja", "a\0b", "x" * 5000, "."])
def test_what_is_neither_is_told_with_the_words_there_are(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither one that ships \(hermes, chatml, llama3, .*deepseek_v3\) nor a file"):
        read_template(name, tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\xff", "is no chat template: 'utf-8'"), (b" \n", "is empty"), (b"x" * (MAX_BYTES + 1), "it has more than 256 KiB")],
)
def test_a_file_that_is_no_template(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_bytes(content)
    with pytest.raises(UserError, match=reason):
        read_template("mine.jinja", tmp_path)


def test_nothing_is_imported_from_the_folder_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the stranger's model folder."""
    (tmp_path / "transformers.py").write_text("open('it_ran', 'w')")
    monkeypatch.chdir(tmp_path)
    try_template("{{ messages }}")
    assert [path.name for path in tmp_path.iterdir()] == ["transformers.py"]


def test_a_template_without_an_end_is_stopped() -> None:
    """In the process that anybody's is tried in; the other ways to take too much are tried in forked ones."""
    started = time.monotonic()
    _is_stopped(LOOPS)
    _is_stopped(LATE)
    assert time.monotonic() - started < 60


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize(
    "text",
    [
        LOOPS,
        LATE,
        LATE.replace("> 4", "> 30"),
        "{% if tools %}" + LOOPS + "{% endif %}",
        "{{ 'a' * 10**10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a' * 2 * 10**6 }}",
    ],
)
def test_a_template_that_takes_too_much_is_stopped(text: str) -> None:
    _is_stopped(text)


def _is_stopped(text: str) -> None:
    with pytest.raises(UserError, match=r"does not end within bounds \(0\.2 s of CPU time, 4 GiB and 1,048,576 characters"):
        try_template(text, cpu_s=0.2)


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize("text", ["{{ raise_exception('no') }}", "\ud800{% if %}"])
def test_other_faults_are_left_to_be_told_with_the_tokenizer(text: str) -> None:
    try_template(text)
