"""TOML of a stranger is data or a `ValueError`, in time that grows with its length and not with its square."""

from __future__ import annotations

import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.base.toml import MAX_LEVELS, loads


@pytest.mark.parametrize("key", ["a." * MAX_LEVELS + "a", '"a" . ' * MAX_LEVELS + "a", "'a.b'.x" + ".c" * MAX_LEVELS])
@pytest.mark.parametrize("line", ["{} = 1", "[{}]", "a = {{ {} = 1 }}"])
def test_a_key_of_many_parts_is_refused_before_it_costs_quadratic_time(key: str, line: str) -> None:
    with pytest.raises(ValueError, match=rf"a key of \d+ parts; it may have {MAX_LEVELS}"):
        loads(line.format(key))


@pytest.mark.parametrize("text", ['a = "{}"', "a = '{}'", 'a = """\n{}"""', "a = 1 # {}", "a = [{}0.5]"])
def test_dots_elsewhere_are_no_parts_of_a_key(text: str) -> None:
    filled = text.format("0.5, " * 300 if "[" in text else "x." * 300)
    assert loads(filled) == tomllib.loads(filled)


@given(st.text(alphabet="a.=\"'[]{}# \n\\1", max_size=60))
def test_what_toml_takes_is_taken(text: str) -> None:
    try:
        wanted = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        with pytest.raises(ValueError, match="is not TOML"):
            loads(text)
    else:
        if any(len(digits) > 18 for digits in re.findall(r"\d+", text)):  # likely a number that TOML does not have
            return
        assert loads(text) == wanted


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63)])
@pytest.mark.parametrize("text", ["a = {}", "a = [[1, {}]]", "[a.b]\nc = {{ d = {} }}", "[[a]]\nb = {}"])
def test_a_whole_number_has_64_bits(text: str, number: int) -> None:
    assert loads(text.format(number)) == tomllib.loads(text.format(number))
    with pytest.raises(ValueError, match="more than 64 bits"):
        loads(text.format(number + (1 if number > 0 else -1)))
