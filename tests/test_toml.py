"""TOML of somebody else: one kind of error, and time that grows with its length only."""

from __future__ import annotations

import time
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import toml


@pytest.mark.parametrize("key", ["a" + ".a" * 16_000, "[a" + ".a" * 16_000 + "]\nb", "x = {b" + ' . "a"' * 9_000, "'a'" + ".'a'" * 9_000])
def test_a_key_of_endless_names_is_refused_at_once(key: str) -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match="nested too deep"):
        toml.loads(f"{key} = 1")
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    "text", ["a" * 65536, "," * 65536, '"' * 65536, "[" * 65536, "{a." * 20000, ",'" * 30000, "a.,a" * 16000, "a " * 30000]
)
def test_looking_for_such_keys_takes_time_proportional_to_the_text(text: str) -> None:
    started = time.process_time()
    toml._LONG_KEY.search(text)
    assert time.process_time() - started < 0.5


def test_a_key_of_many_names_and_a_text_of_many_numbers_are_read() -> None:
    key = "a" + ".a" * (toml.MAX_PARTS - 1)
    assert toml.loads(f"{key} = 1") == tomllib.loads(f"{key} = 1")
    numbers = " ".join(f"{number}.5" for number in range(400))
    assert toml.loads(f'a = """\n{numbers}\n{"." * 400}\n"""')["a"] == f"{numbers}\n{'.' * 400}\n"


@given(st.text(alphabet="ab.=[]{}\"'\n 1,#", max_size=80))
def test_what_is_read_is_what_the_library_reads(text: str) -> None:
    try:
        wanted = tomllib.loads(text)
    except ValueError:
        with pytest.raises(ValueError, match=r"TOML|deep"):
            toml.loads(text)
    else:
        assert toml.loads(text) == wanted
