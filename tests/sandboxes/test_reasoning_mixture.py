"""Parsing of a recipe's datasets, and their rotation. Needs no optional package."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import UserError
from sandboxes.reasoning import catalogue
from sandboxes.reasoning.mixture import Rounds, Source, parse


def test_names_levels_keys_and_weights() -> None:
    assert parse("", "datasets") == ()
    assert parse('chain_sum, gcd:2,spell_backward@1 , products@0(max_terms=2 operators=["+","-"] order=up):4', "datasets") == (
        Source(name="chain_sum"),
        Source(name="gcd", weight=2),
        Source(name="spell_backward", level=1),
        Source(name="products", level=0, keys={"max_terms": 2, "operators": ["+", "-"], "order": "up"}, weight=4),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chain_sum gcd", "'chain_sum gcd'"),
        ("gcd,,lcm", "',lcm'"),
        ("gcd:", "'gcd:'"),
        ("gcd:0", "weight 0"),
        ("gcd:1001", "weight 1001"),
        ("gcd(max_terms)", "not key=value"),
        ("gcd(__class__.x=1)", "not key=value"),
        ("gcd, lcm, gcd:2", "gcd twice"),
    ],
)
def test_unparsable_text_is_reported_with_its_position(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(text, "datasets")
    assert message in str(error.value) and error.value.fix


def test_the_form_in_an_error_message_can_be_parsed() -> None:
    with pytest.raises(UserError) as error:
        parse("chain_sum gcd", "datasets")
    first, _, last = parse(error.value.fix.partition("'")[2].removesuffix("'"), "datasets")
    assert first.name == "chain_sum" and (last.name, last.level, dict(last.keys)) == ("products", 1, {"max_terms": 2, "max_digits": 3})


@given(st.text())
def test_any_text_is_parsed_or_raises(text: str) -> None:
    try:
        names = [source.name for source in parse(text, "datasets")]
    except UserError:
        return
    assert len(names) == len(set(names))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 10_000))
def test_every_round_has_each_dataset_as_often_as_its_weight(weights: list[int], start: int) -> None:
    sources = [Source(name=f"d{position}", weight=weight) for position, weight in enumerate(weights)]
    rounds = Rounds(sources)
    turns = [rounds.at(index) for index in range(start * len(rounds), (start + 2) * len(rounds))]
    assert Counter(source.name for source, _ in turns) == {source.name: 2 * source.weight for source in sources}
    for source in sources:
        numbers = [number for turn, number in turns if turn is source]
        assert numbers == list(range(start * source.weight, (start + 2) * source.weight)), "each problem comes once"


def test_excluded_dataset_raises_with_the_reason() -> None:
    with pytest.raises(UserError, match="full marks for any answer"):
        catalogue.admit(Source(name="game_of_life_halting"))
    with pytest.raises(UserError, match="from left to right"):
        catalogue.admit(Source(name="basic_arithmetic", keys={"allow_parentheses": False}))
    catalogue.admit(Source(name="basic_arithmetic", keys={"allow_parentheses": True}))


@pytest.mark.parametrize(
    "name", ["binary_matrix", "countdown", "n_queens", "number_sorting", "spiral_matrix", "string_insertion", "complex_arithmetic"]
)
def test_alphabets_of_evaluated_answers_allow_no_program(name: str) -> None:
    for program in (
        "__import__('os')",
        "exit()",
        "open('/etc/passwd')",
        "9**9**9",
        "9 * * 9",
        "9*\n*9",
        "lambda: 0",
        "A()",
        "nan",
        "x.y",
        "[].clear()",
    ):
        assert not catalogue.speaks(name, program), program


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("countdown", "(75 - 4) * 2 + 10/5"),
        ("binary_matrix", "0 1\n2 11"),
        ("n_queens", "_ Q\nQ _"),
        ("complex_arithmetic", "-15.0 + 3.0i"),
        ("prime_factorization", "2 \u00d7 2 \u00d7 5"),
        ("chain_sum", "anything"),
    ],
)
def test_answers_fit_their_alphabet(name: str, answer: str) -> None:
    assert catalogue.speaks(name, answer)
