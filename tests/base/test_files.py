"""Files that are replaced atomically, and files of lines."""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.base import files
from agentrl.base.untrusted_files import MAX_LEVELS, loads
from agentrl.errors import StoreError
from tests.strategies import examples


def test_a_file_is_replaced_and_no_other_file_remains(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_atomically(path, "é")
    files.write_atomically(path, b"second", durable=True, tag="7")
    assert path.read_bytes() == b"second" and list(tmp_path.iterdir()) == [path]


def test_pipes_and_links_are_written_to_and_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a pipe and a link in a temporary folder. Replacing such a file as root would delete the machine's /dev/null."""
    pipe, output_file = tmp_path / "pipe", tmp_path / "said"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_atomically(pipe, "through the pipe", durable=True)
    assert os.read(reader, 100) == b"through the pipe" and pipe.is_fifo()
    os.close(reader)
    (stdout := tmp_path / "dev" / "stdout").parent.mkdir()
    stdout.symlink_to(output_file)  # as if the output of the process goes to a file
    output_file.touch()
    monkeypatch.setattr(files, "_OPENED", (stdout.parent,))
    files.write_atomically(stdout, "said")
    assert output_file.read_text() == "said" and stdout.is_symlink()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["dev", "pipe", "said", "stdout"]


def test_a_failed_block_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_atomically(path, "before")

    def interrupted() -> None:
        with files.replace_file(path) as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_content_is_synced_before_the_replacement_and_the_folder_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def recorded_fsync(handle: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def recorded_replace(self: Path, target: Path) -> Path:
        calls.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    files.write_atomically(tmp_path / "a", b"x")
    assert calls == [".a.part", "replace"]
    calls.clear()
    files.write_atomically(tmp_path / "a", b"y", durable=True)
    assert calls == [".a.part", "replace", tmp_path.name]
    calls.clear()
    files.append_lines(tmp_path / "lines", [b"1\n"], durable=True)
    files.append_lines(tmp_path / "lines", [b"2\n"], durable=True)
    assert calls == ["lines", tmp_path.name, "lines"]


def test_a_folder_appears_complete_and_replaces_the_previous_one(tmp_path: Path) -> None:
    final = tmp_path / "new" / "000001"
    for content in ("first", "second"):
        (files.partial_folder(final) / "litter").write_text("of an attempt that was interrupted")
        part = files.partial_folder(final)
        (part / "sub").mkdir()
        (part / "sub" / "a").write_text(content)
        files.commit_folder(part, final)
        assert [path.relative_to(final).as_posix() for path in sorted(final.rglob("*"))] == ["sub", "sub/a"]
        assert (final / "sub" / "a").read_text() == content and list(final.parent.iterdir()) == [final]


def test_hashes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(b"abc" * 100_000)
    (tmp_path / "link").symlink_to(tmp_path / "sub" / "a")
    assert files.folder_manifest(tmp_path) == {"sub/a": hashlib.sha256(b"abc" * 100_000).hexdigest()}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=6,
)


@settings(max_examples=examples(30))
@given(values=st.lists(json_values, max_size=5), later=st.lists(json_values, max_size=2), data=st.data())
def test_all_lines_but_a_torn_one_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, values: list[object], later: list[object], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("lines") / "deep" / "lines.jsonl"
    assert files.read_json_lines(path) == []
    files.append_lines(path, map(files.json_line, values))
    content = path.read_bytes()
    truncated = content[: data.draw(st.integers(0, len(content)))]
    path.write_bytes(truncated)
    complete_values = values[: truncated.count(b"\n")]
    assert files.read_json_lines(path) == complete_values
    files.append_lines(path, map(files.json_line, later))
    assert files.read_json_lines(path) == [*complete_values, *later], "lines after a torn line are not lost"


def test_the_tail_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert files.tail_bytes(path, most=5) == ""
    path.write_bytes(b"0123456789")
    assert files.tail_bytes(path, most=5) == "56789"
    assert files.tail_bytes(path, most=5, start=8) == "89"
    assert files.tail_bytes(path, most=50, start=3) == "3456789"


# Untrusted TOML yields data or a `ValueError`, in time linear in its length.
@pytest.mark.parametrize("key", ["a." * MAX_LEVELS + "a", '"a" . ' * MAX_LEVELS + "a", "'a.b'.x" + ".c" * MAX_LEVELS])
@pytest.mark.parametrize("line", ["{} = 1", "[{}]", "a = {{ {} = 1 }}"])
def test_a_key_of_many_parts_raises_before_it_costs_quadratic_time(key: str, line: str) -> None:
    with pytest.raises(ValueError, match=rf"a key with \d+ parts; the maximum is {MAX_LEVELS}"):
        loads(line.format(key))


@pytest.mark.parametrize("text", ['a = "{}"', "a = '{}'", 'a = """\n{}"""', "a = 1 # {}", "a = [{}0.5]"])
def test_dots_outside_a_key_do_not_count(text: str) -> None:
    filled = text.format("0.5, " * 300 if "[" in text else "x." * 300)
    assert loads(filled) == tomllib.loads(filled)


@given(st.text(alphabet="a.=\"'[]{}# \n\\1", max_size=60))
def test_valid_toml_is_accepted(text: str) -> None:
    try:
        expected = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        with pytest.raises(ValueError, match="is not TOML"):
            loads(text)
    else:
        if any(len(digits) > 18 for digits in re.findall(r"\d+", text)):  # likely a number that TOML does not have
            return
        assert loads(text) == expected


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63)])
@pytest.mark.parametrize("text", ["a = {}", "a = [[1, {}]]", "[a.b]\nc = {{ d = {} }}", "[[a]]\nb = {}"])
def test_integers_have_at_most_64_bits(text: str, number: int) -> None:
    assert loads(text.format(number)) == tomllib.loads(text.format(number))
    with pytest.raises(ValueError, match="more than 64 bits"):
        loads(text.format(number + (1 if number > 0 else -1)))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"step": 1,, "a": 2}', "Expecting property name"),
        ('{"stop": 1, "a": 2}', "not an object with step and a"),
        ("null", "not an object with step and a"),
        ('"step a"', "not an object with step and a"),
    ],
)
def test_the_error_for_a_damaged_json_line_names_the_file_the_line_and_the_fix(tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / "lines").write_text(f'{{"step": 0, "a": 1}}\n{line}\n{{"step": 2, "a": 1}}\n')
    with pytest.raises(StoreError, match=rf"line 2 of .*/lines is damaged: .*{why}.*\n  fix: .*delete the line"):
        files.read_json_lines(tmp_path / "lines", "step", "a")


def test_numbered_folders_are_sorted_by_number(tmp_path: Path) -> None:
    assert files.numbered_folders(tmp_path / "none") == []
    for name in ("1000000", "999999", "000002", ".000003.part", "copy"):
        (tmp_path / name).mkdir()
    (tmp_path / "000004").touch()
    assert [path.name for path in files.numbered_folders(tmp_path)] == ["000002", "999999", "1000000"]
