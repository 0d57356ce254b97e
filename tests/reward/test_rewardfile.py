"""Parsing of reward files, which any program in the sandbox may have written."""

from __future__ import annotations

import pytest

from agentrl.reward.cleanroom import parse_reward


@pytest.mark.parametrize(
    ("txt", "as_json", "value"),
    [
        ("1\n", None, 1.0),
        ("0.25", None, 0.25),
        ("0", '{"reward": 1}', 0.0),
        ("", '{"reward": 1}', 1.0),
        (None, '{"reward": 0.5, "speed": 12}', 0.5),
        (None, '{"accuracy": 0.75}', 0.75),
        (None, None, None),
    ],
)
def test_a_reward_is_a_number_from_0_to_1(txt: str | None, as_json: str | None, value: float | None) -> None:
    found, wrong = parse_reward(txt, as_json)
    assert found == value and bool(wrong) == (value is None)


@pytest.mark.parametrize("txt", ["passed", "nan", "inf", "-1", "1.01", "1 1", "9" * 5000])
def test_invalid_text_earns_0(txt: str) -> None:
    assert parse_reward(txt, None)[0] == 0.0 and "reward.txt" in parse_reward(txt, None)[1]


@pytest.mark.parametrize(
    "as_json",
    ["", "1", "[1]", "{}", '{"reward": true}', '{"reward": "1"}', '{"reward": NaN}', '{"a": 1, "b": 1}', "[" * 99999, '{"reward": 2}'],
)
def test_invalid_json_earns_0(as_json: str) -> None:
    assert parse_reward(None, as_json)[0] == 0.0 and "reward.json" in parse_reward(None, as_json)[1]
