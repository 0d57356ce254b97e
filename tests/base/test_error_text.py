"""The cause of a failure, extracted from a log or an exception. The log excerpts come from real failed starts, shortened."""

from __future__ import annotations

import errno
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.error_text import (
    cause_in_log,
    clip_text,
    disk_full_error,
    error_chain,
    group_members,
    main_error,
    one_line_error,
    raise_location,
)
from agentrl.errors import DiskFull, ServingError, StoreError, UserError

REFUSED_MODEL = """\
(APIServer pid=4711) INFO 11-22 04:01:02 [utils.py:299] non-default args: {'port': 1}
Traceback (most recent call last):
  File "vllm/config/model.py", line 1, in __init__
    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, The checkpoint you are trying to load has model type `no_such` but Transformers does not recognize this architecture.

You can update Transformers with the command `pip install --upgrade transformers`. [type=value_error]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
ENGINE = """\
(EngineCore pid=12) ERROR 11-22 04:03:07 [core.py:1] EngineCore failed to start.
(EngineCore pid=12) ERROR 11-22 04:03:07 [core.py:1] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-22 04:03:07 [core.py:1]   File "vllm/v1/engine/core.py", line 1, in run_engine_core
(EngineCore pid=12) ERROR 11-22 04:03:07 [core.py:1] safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata
(APIServer pid=11) Traceback (most recent call last):
(APIServer pid=11)   File "vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "cause", "fix"),
    [
        (REFUSED_MODEL, "The checkpoint you are trying to load has model type `no_such`", ""),
        (ENGINE, "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata", ""),
        ("x\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n" + ENGINE, "the GPU is out", "gpu_memory_utilization"),
        ("OSError: [Errno 98] Address already in use\n", "its port is in use", "start the run again"),
        ("write failed: No space left on device\n", "the disk is full", "free space"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried\n", "the machine is out", "kv_cache_gb"),
        ("INFO starting\nIllegal instruction\n\n", "Illegal instruction", ""),
        ("", "", ""),
    ],
)
def test_the_root_cause_is_extracted_from_a_log(log: str, cause: str, fix: str) -> None:
    reported_cause, advice = cause_in_log(log)
    assert reported_cause.startswith(cause) and fix in advice and "See root cause" not in reported_cause
    assert bool(cause) == bool(reported_cause) and bool(fix) == bool(advice)


def test_a_full_disk_is_recognized_in_the_causes_of_an_error() -> None:
    def chained() -> ExceptionGroup[Exception]:
        try:
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError as error:
                raise StoreError("cannot write") from error
        except StoreError as error:
            return ExceptionGroup("two", [KeyError("x"), error])

    assert disk_full_error(chained()) is not None
    assert isinstance(main_error(chained()), StoreError)
    assert disk_full_error(OSError(errno.EDQUOT, "quota")) and disk_full_error(DiskFull("x"))
    assert disk_full_error(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"))
    assert not disk_full_error(OSError(errno.EACCES, "denied")) and not disk_full_error(KeyError("space"))
    assert not disk_full_error(RuntimeError("PytorchStreamReader failed reading zip archive [inline_container.cc:1]"))


def test_the_most_informative_of_several_errors_is_shown() -> None:
    bug, server, user = KeyError("k"), ServingError("died"), UserError("wrong", fix="right")
    assert main_error(BaseExceptionGroup("g", [bug, ExceptionGroup("h", [server])])) is server
    assert main_error(BaseExceptionGroup("g", [bug, ExceptionGroup("h", [server, user])])) is user
    assert main_error(BaseExceptionGroup("g", [bug, ValueError()])) is bug and main_error(bug) is bug


def test_an_error_is_located_in_user_code_and_clipped_to_a_few_lines() -> None:
    def caught() -> Exception:
        try:
            int("\n".join(["no number"] * 99))
        except ValueError as error:
            return error
        raise AssertionError

    assert raise_location(caught()).startswith("tests/base/test_error_text.py:")
    assert raise_location(KeyError()) == "" and one_line_error(KeyError()) == "KeyError"
    assert len(one_line_error(caught())) <= 600 and len(clip_text("line\n" * 99).splitlines()) == 6


def test_code_installed_in_another_environment_is_not_user_code(tmp_path: Path) -> None:
    """With stacked environments, a wrong keyword in a recipe was located in pydantic's main.py."""
    library = tmp_path / "base" / "lib" / "python3.11" / "site-packages" / "pydantic_like.py"
    library.parent.mkdir(parents=True)
    library.write_text("def check(**options):\n    raise TypeError(f'unknown: {options}')\n")
    scope: dict[str, Any] = {}
    exec(compile(library.read_text(), str(library), "exec"), scope)
    with pytest.raises(TypeError) as error:
        scope["check"](colour="red")
    assert "test_error_text.py:" in raise_location(error.value)


def test_libraries_selects_a_line_of_a_library_instead_of_agentrl(monkeypatch: pytest.MonkeyPatch) -> None:
    def caught() -> Exception:
        try:
            json.loads("{")
        except ValueError as error:
            return error
        raise AssertionError

    monkeypatch.setattr("agentrl.base.error_text._PACKAGE", str(Path(__file__).parent))
    assert "test_error_text.py:" in raise_location(caught()) and "json/decoder.py:" in raise_location(caught(), libraries=True)


def test_the_leaves_of_nested_groups_are_listed_in_order() -> None:
    deep: BaseException = ValueError("deep")
    for _ in range(5000):
        deep = ExceptionGroup("g", [deep])
    leaves = list(
        group_members(BaseExceptionGroup("all", [KeyError("first"), ExceptionGroup("g", [KeyError("second"), OSError("third")]), deep]))
    )
    assert [str(leaf.args[0]) for leaf in leaves] == ["first", "second", "third", "deep"]
    assert list(group_members(leaves[0])) == [leaves[0]]


def test_each_error_of_a_chain_is_listed_once() -> None:
    bug, server, task = KeyError("k"), ServingError("died"), ValueError("v")
    group = BaseExceptionGroup("g", [bug, bug, server])
    server.__cause__, server.__context__, bug.__context__ = task, group, server
    assert list(error_chain(group)) == [group, bug, server, task]


@pytest.mark.parametrize("text", ["No space left on device", "Disk quota exceeded", "database or disk is full"])
def test_error_messages_of_a_full_disk(text: str) -> None:
    assert disk_full_error(RuntimeError(f"write failed: {text}"))


def test_sqlite_error_codes_of_a_full_disk() -> None:
    for code, full in ((sqlite3.SQLITE_FULL, True), (sqlite3.SQLITE_FULL | 5 << 8, True), (sqlite3.SQLITE_IOERR, False)):
        error = sqlite3.OperationalError("no")
        error.sqlite_errorcode = code
        assert (disk_full_error(error) is error) is full
    assert disk_full_error(sqlite3.OperationalError("no")) is None
    other = RuntimeError("no")
    other.sqlite_errorcode = sqlite3.SQLITE_FULL  # type: ignore[attr-defined]
    assert disk_full_error(other) is None, "not an error of SQLite"


def test_a_full_disk_is_shown_before_other_errors() -> None:
    full = OSError(errno.ENOSPC, "full")
    assert main_error(ExceptionGroup("g", [UserError("wrong", fix="right"), full])) is full


def test_a_syntax_error_is_located_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").touch()
    assert raise_location(SyntaxError("bad", (str(tmp_path / "recipe.py"), 3, 1, "x"))) == f"{tmp_path}/recipe.py:3"
    assert raise_location(SyntaxError("bad", ("<string>", 3, 1, "x"))) == raise_location(SyntaxError("bad")) == ""


def test_a_cause_is_clipped_to_600_characters() -> None:
    assert clip_text("x" * 600) == "x" * 600 and clip_text("x" * 601) == "x" * 597 + "..."


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("Traceback\nValueError: no", "ValueError: no"),
        ("x.ValidationError: 1 error", "x.ValidationError: 1 error"),
        ("x.ValidationError: 1 error\n  Value error, why", "why"),
        ("x.ValidationError: 1 error\n  Field required", "x.ValidationError: 1 error\n  Field required"),
        ("RuntimeError: a\n  Value error, b", "RuntimeError: a\n  Value error, b"),
        ("  z\nRuntimeError: a\n  b\n  c\nd\n  e", "RuntimeError: a\n  b\n  c"),
        ("RuntimeError: a\nd\n  e", "RuntimeError: a"),
    ],
)
def test_the_message_of_the_last_error_of_a_log(log: str, cause: str) -> None:
    assert cause_in_log(log) == (cause, "")


@pytest.mark.parametrize("name", ["<generated " + "x" * 300 + ">", "a\0b", "", "/proc/1/root/x.py"])
def test_code_without_a_file_has_the_location_of_its_caller(name: str) -> None:
    for program in ("1 / 0", "1 +"):
        with pytest.raises((ZeroDivisionError, SyntaxError, ValueError)) as raised:
            exec(compile(program, name, "exec"), {})
        assert raise_location(raised.value).startswith("tests/base/test_error_text.py:")
