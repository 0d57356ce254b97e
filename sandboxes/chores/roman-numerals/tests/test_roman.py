"""These tests share a process with the code under test; see docs/security.md for what that costs."""

import pytest
from roman import from_roman, to_roman


@pytest.mark.parametrize(("number", "text"), [(1, "I"), (4, "IV"), (1994, "MCMXCIV"), (2026, "MMXXVI"), (3999, "MMMCMXCIX")])
def test_known_numbers(number, text):
    assert type(to_roman(number)) is str and to_roman(number) == text
    assert type(from_roman(text)) is int and from_roman(text) == number


def test_there_and_back():
    assert [from_roman(to_roman(number)) for number in range(1, 4000)] == list(range(1, 4000))


@pytest.mark.parametrize("text", ["", "IIII", "ic", "IC", "VX", "MMMM", "XIIX", " X"])
def test_other_spellings_are_refused(text):
    with pytest.raises(ValueError):
        from_roman(text)


@pytest.mark.parametrize("number", [0, -1, 4000, 1.5])
def test_other_numbers_are_refused(number):
    with pytest.raises(ValueError):
        to_roman(number)
