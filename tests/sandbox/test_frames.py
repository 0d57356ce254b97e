"""Frames from a sandbox: valid ones are parsed, all others raise a typed error."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import SandboxError
from agentrl.sandbox import frames
from agentrl.sandbox.frames import FrameError

GOOD = {"id": 1, "ok": True, "exit": 0, "reason": "", "wall_s": 0.5, "truncated": False, "stdout": 3}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def test_program_result():
    result = frames.parse_result(GOOD, b"outerr\xff")
    assert (result.exit_code, result.stdout, result.stderr, result.reason) == (0, "out", "err\ufffd", "")
    killed = frames.parse_result({**GOOD, "exit": None, "reason": "timeout"}, b"out")
    assert (killed.exit_code, killed.reason, killed.ok) == (None, "timeout", False)


def test_result_of_a_call_in_a_session():
    result = frames.parse_result({**GOOD, "restarted": True, "ended": False}, b"outerr")
    assert result.restarted and not result.session_ended
    assert not frames.parse_result(GOOD, b"outerr").restarted
    for invalid in ({"ended": True}, {"restarted": 1, "ended": False}, {"restarted": None, "ended": True}):
        with pytest.raises(FrameError):
            frames.parse_result({**GOOD, **invalid}, b"outerr")


@pytest.mark.parametrize(
    "change",
    [
        {"exit": None},
        {"exit": 256},
        {"exit": -1},
        {"exit": True},
        {"exit": "0"},
        {"reason": "timeout"},
        {"exit": None, "reason": "__import__('os')"},
        {"wall_s": float("nan")},
        {"wall_s": float("inf")},
        {"wall_s": -1.0},
        {"wall_s": 10**400},
        {"stdout": 8},
        {"stdout": -1},
        {"truncated": 1},
        {"extra": 1},
    ],
)
def test_program_result_out_of_range_is_refused(change):
    with pytest.raises(FrameError):
        frames.parse_result({**GOOD, **change}, b"outerr")


def test_missing_field_is_refused():
    with pytest.raises(FrameError):
        frames.parse_result({key: value for key, value in GOOD.items() if key != "wall_s"}, b"outerr")


@given(st.dictionaries(st.sampled_from([*GOOD, "more"]), json_values), st.binary(max_size=16))
def test_any_header_gives_a_result_or_a_typed_error(change, body):
    try:
        result = frames.parse_result({**GOOD, **change}, body)
    except SandboxError:
        return
    assert (result.exit_code is None) == (result.reason in ("timeout", "memory", "killed"))
    assert result.wall_s >= 0


@given(st.data(), st.binary(max_size=16), st.floats(0, 1e9) | st.integers(0, 1000), st.booleans())
def test_any_valid_header_gives_its_result(data, body, wall_s, truncated):
    cut = data.draw(st.integers(0, len(body)))
    code, reason = data.draw(
        st.integers(0, 255).map(lambda code: (code, ""))
        | st.sampled_from(["timeout", "memory", "killed"]).map(lambda reason: (None, reason))
    )
    header = {"id": 1, "ok": True, "exit": code, "reason": reason, "wall_s": wall_s, "truncated": truncated, "stdout": cut}
    result = frames.parse_result(header, body)
    assert (result.exit_code, result.reason, result.wall_s, result.truncated) == (code, reason, wall_s, truncated)
    assert (result.stdout, result.stderr) == (body[:cut].decode(errors="replace"), body[cut:].decode(errors="replace"))


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_header_bytes_give_an_object_with_id_and_ok_or_a_typed_error(data):
    try:
        value = frames.parse_header(data)
    except SandboxError:
        return
    assert type(value["id"]) is int and type(value["ok"]) is bool


def test_deeply_nested_header_is_a_typed_error():
    with pytest.raises(FrameError):
        frames.parse_header(b"[" * frames.MAX_REPLY_HEADER)


SIZES = st.integers(0, 2**32 - 1) | st.integers(0, frames.MAX_REPLY_HEADER + 2)


@given(SIZES, SIZES)
def test_prefix_is_read_within_its_limits(header_size, body_size):
    data = frames.PREFIX.pack(header_size, body_size)
    if 2 <= header_size <= frames.MAX_REPLY_HEADER:
        assert frames.parse_prefix(data) == (header_size, body_size)
    else:
        with pytest.raises(FrameError):
            frames.parse_prefix(data)


@given(st.integers(), st.booleans(), st.dictionaries(st.text(max_size=8), json_values, max_size=3))
def test_header_with_id_and_ok_is_returned(number, ok, fields):
    value = {**fields, "id": number, "ok": ok}
    text = json.dumps(value)
    assert json.dumps(frames.parse_header(text.encode())) == text


def test_unknown_failure_kind_is_refused():
    assert frames.parse_failure({"id": 1, "ok": False, "error": "not_found", "message": "m"}) == ("not_found", "m")
    with pytest.raises(FrameError):
        frames.parse_failure({"id": 1, "ok": False, "error": "SystemExit", "message": "m"})


def test_oversized_request_is_refused_before_it_is_sent():
    with pytest.raises(ValueError, match="larger than"):
        frames.encode({"argv": ["x" * frames.MAX_REQUEST_HEADER]})
