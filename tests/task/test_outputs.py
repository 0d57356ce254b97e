"""Outputs: properties of patterns and paths, and collection from misbehaving sandboxes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import SandboxError, SandboxTimeout
from agentrl.records import OUTPUT_BYTES, OUTPUT_FILES, REMOVED_FILES, ExecResult
from agentrl.records.paths import is_plain_path, pattern_error
from agentrl.task.outputs import WHOLE_DIRECTORY, collect_outputs, example_path, is_exact, matches_pattern, overlay, select_files
from agentrl.testing.sandboxes import ScriptedSandbox, printing

NAME = st.text("ab.*?", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
STEP = st.one_of(st.just("**"), NAME.filter(lambda name: "**" not in name))
PATTERN = st.lists(STEP, min_size=1, max_size=5).map("/".join)
PATH = st.lists(st.text("ab.", min_size=1, max_size=3).filter(lambda name: name not in (".", "..")), min_size=1, max_size=5).map("/".join)
FILES = st.dictionaries(PATH, st.binary(max_size=3), max_size=8)


def slow_matches(steps: list[str], names: list[str]) -> bool:
    """Matches by the literal definition."""
    if not steps or not names:
        return not steps and not names
    if steps[0] == "**":
        rest = steps[1:] or ["*"]
        return any(slow_matches(rest, names[cut:]) for cut in range(len(names)))
    return slow_name(steps[0], names[0]) and slow_matches(steps[1:], names[1:])


def slow_name(step: str, name: str) -> bool:
    if not step or not name:
        return not step.strip("*") and not name
    if step[0] == "*":
        return any(slow_name(step[1:], name[cut:]) for cut in range(len(name) + 1))
    return step[0] in ("?", name[0]) and slow_name(step[1:], name[1:])


@given(PATTERN, PATH)
def test_matching_follows_its_definition(pattern: str, path: str) -> None:
    assert matches_pattern(pattern, path) == slow_matches(pattern.split("/"), path.split("/"))


@given(PATTERN)
def test_example_matches_and_an_exact_pattern_is_its_example(pattern: str) -> None:
    assert not pattern_error(pattern)
    assert matches_pattern(pattern, example_path(pattern)) and is_plain_path(example_path(pattern))
    assert is_exact(pattern) == (example_path(pattern) == pattern)


def test_matching_does_not_take_exponential_time() -> None:
    assert not matches_pattern("**/" * 30 + "x", "/".join(["a"] * 32))
    assert not matches_pattern("*a" * 40 + "b", "a" * 400)


@given(st.text(max_size=40))
def test_plain_path_stays_below_its_folder_and_is_storable(path: str) -> None:
    if is_plain_path(path):
        assert not path.startswith("/") and ".." not in path.split("/") and "\0" not in path
        assert json.loads(json.dumps(path)).encode().decode() == path


@pytest.mark.parametrize("path", ["", "/etc/passwd", "..", "a/../b", "a//b", "./a", "a/", "a\0b", "a/\udcff", "x" * 600, "a/" * 40 + "b"])
def test_escaping_or_invalid_paths_are_rejected(path: str) -> None:
    assert not is_plain_path(path)
    assert pattern_error(path)


@pytest.mark.parametrize("pattern", ["a**", "src/**.py", "[ab].txt"])
def test_ambiguous_patterns_are_rejected(pattern: str) -> None:
    assert pattern_error(pattern)


@given(FILES, FILES)
def test_overlay_is_writable_and_keeps_all_files_above(below: dict[str, bytes], above: dict[str, bytes]) -> None:
    above = writable(above)
    result = overlay(writable(below), above)
    assert result == writable(result)
    assert above.items() <= result.items()
    assert {path for path in result if path not in above} <= set(below)


def writable(files: dict[str, bytes]) -> dict[str, bytes]:
    """Returns the files whose path is not also a folder of another file."""
    return {path: data for path, data in files.items() if not any(other.startswith(path + "/") for other in files)}


@given(FILES, st.lists(PATTERN, max_size=3))
def test_select_returns_the_matching_files(files: dict[str, bytes], patterns: list[str]) -> None:
    assert select_files(files, patterns) == {path: data for path, data in files.items() if any(matches_pattern(p, path) for p in patterns)}


class Refusing(ScriptedSandbox):
    """Rejects what an exec server rejects: links and other files that are not regular."""

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        if self.files.get(path) == b"LINK":
            raise ValueError(f"{path!r} is not a readable regular file")
        return await super().read(path, max_bytes=max_bytes)


def listing(*names: str) -> Callable[[str], ExecResult]:
    return printing(json.dumps(names))


async def test_links_are_rejected_and_missing_files_ignored() -> None:
    sandbox = Refusing("s", printing(""), {"a": b"1", "link": b"LINK"})
    collected = await collect_outputs(sandbox, ["a", "link", "missing"])
    assert collected.files == {"a": b"1"}
    assert list(collected.refused) == ["link"]


async def test_a_listing_only_proposes_names() -> None:
    names = ("src/a.py", "src/b.txt", "../etc/passwd", "/etc/passwd", "src/../x.py", "src/\udcff.py", "secret.py")
    sandbox = Refusing("s", listing(*names), dict.fromkeys(names, b"x"))
    assert set((await collect_outputs(sandbox, ["src/*.py"])).files) == {"src/a.py"}


async def test_uncollected_files_are_reported_as_storable_text() -> None:
    deep, long = "/".join("d" * 40), "x" * 600
    collected = await collect_outputs(Refusing("s", listing("a", "\udcff", deep, long, "gone"), {"a": b"1"}), ["**", "missing"])
    assert collected.files == {"a": b"1"}
    assert set(collected.refused) == {"\\udcff", deep[:100], long[:100], "gone"}
    json.dumps(dict(collected.refused), ensure_ascii=False).encode()


async def test_number_of_names_that_are_read_is_limited() -> None:
    read_paths = []

    class Counting(Refusing):
        async def read(self, path: str, *, max_bytes: int) -> bytes:
            read_paths.append(path)
            return await super().read(path, max_bytes=max_bytes)

    names = [f"f{number}" for number in range(20_000)]
    collected = await collect_outputs(Counting("s", listing(*names), {}), ["*"])
    assert not collected.files and len(read_paths) <= OUTPUT_FILES + 1 and len(collected.refused) <= OUTPUT_FILES + 2


@pytest.mark.parametrize("listing_text", ["", "{}", "[1, 2]", "[" * 100_000, '["a"'])
async def test_invalid_listing_is_blamed_on_the_agent(listing_text: str) -> None:
    collected = await collect_outputs(Refusing("s", printing(listing_text), {"a": b"1"}), ["*"])
    assert not collected.files and "*" in collected.refused


async def test_listing_that_cannot_start_is_blamed_on_the_agent() -> None:
    full = ExecResult(exit_code=126, stdout="", stderr="agentrl: cannot start: no processes", wall_s=0.0)
    collected = await collect_outputs(Refusing("s", lambda code: full, {"a": b"1", "b": b"2"}), ["a", "*.txt"])
    assert collected.files == {"a": b"1"} and "cannot start" in collected.refused["*.txt"]


async def test_number_and_size_of_outputs_are_limited() -> None:
    names = [f"f{number}" for number in range(OUTPUT_FILES + 5)]
    many = await collect_outputs(Refusing("s", listing(*names), dict.fromkeys(names, b"")), ["*"])
    assert len(many.files) == OUTPUT_FILES and len(many.refused) == 1
    big = await collect_outputs(Refusing("s", printing(""), {"a": bytes(OUTPUT_BYTES - 1), "b": b"22", "c": b"3"}), ["a", "b", "c"])
    assert set(big.files) == {"a", "c"} and set(big.refused) == {"b"}


async def test_lost_or_silent_sandbox_is_an_infrastructure_fault() -> None:
    closed = Refusing("s", printing(""), {})
    await closed.close()
    with pytest.raises(SandboxError):
        await collect_outputs(closed, ["*"])

    class Silent(Refusing):
        async def read(self, path: str, *, max_bytes: int) -> bytes:
            await asyncio.sleep(60)
            return b""

    with pytest.raises(SandboxTimeout):
        await collect_outputs(Silent("s", printing(""), {}), ["a"], timeout_s=0.05)


async def test_whole_directory_collects_the_changes_to_the_image() -> None:
    assert (
        is_exact(WHOLE_DIRECTORY) is False
        and matches_pattern(WHOLE_DIRECTORY, "a/b")
        and example_path(WHOLE_DIRECTORY) == "x"
        and pattern_error(WHOLE_DIRECTORY)
    )
    changes = json.dumps([["new", "../x", "a/b"], ["old", "/etc/passwd", "a/../b"]])
    collected = await collect_outputs(Refusing("s", printing(changes), {"new": b"1", "a/b": b"2", "untold": b"3"}), [WHOLE_DIRECTORY])
    assert collected.files == {"new": b"1", "a/b": b"2"} and collected.removed == ("old",)
    assert set(collected.refused) == {"../x"}
    for invalid in ("[]", "[[1], []]", '{"a": 1}', "[" * 9999, "[[], [], []]", json.dumps([["new"], None])):
        collected = await collect_outputs(Refusing("s", printing(invalid), {"new": b"1"}), [WHOLE_DIRECTORY])
        assert not collected.files and not collected.removed and "cannot be listed" in collected.refused[WHOLE_DIRECTORY], invalid
    many = json.dumps([["new"], [f"f{number}" for number in range(REMOVED_FILES + 1)]])
    collected = await collect_outputs(Refusing("s", printing(many), {"new": b"1"}), [WHOLE_DIRECTORY])
    assert len(collected.removed) == REMOVED_FILES
