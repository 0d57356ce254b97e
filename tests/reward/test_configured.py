"""`strip_code_fence` and `answer_of`: one fenced block is unwrapped, and other text is unchanged."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.judge.verdict import Unreadable, json_object
from agentrl.reward.cleanroom import parse_reward
from agentrl.reward.configured import answer_of, strip_code_fence
from rewards.json_schema import JsonSchema
from tests.judging import episode, value

J = '{"city": "Rome"}'
ONE_BLOCK = [
    f"```json\n{J}\n```",
    f"```JSON\n{J}\n```",
    f"```Json \n{J}\n``` ",
    f"```\n{J}\n```",
    f"```json5\r\n{J}\r\n```\r\n",
    f"~~~json\n{J}\n~~~",
    f"~~~~\n{J}\n~~~~~",
    f"````\n{J}\n````",
    f"   ```json\n   {J}\n   ```",
    f"```json\n{J}",
    f"```json\n{J}```",
    f"```json{J}```",
    f"```{J}```",
    f"``` json {J} ```",
    f"```{J[:8]}\n{J[8:]}```",
]


@pytest.mark.parametrize("text", ONE_BLOCK)
async def test_one_block_is_replaced_by_its_content(text: str) -> None:
    schema = {"type": "object", "required": ["city"]}
    assert json.loads(strip_code_fence(text, "json")) == {"city": "Rome"}
    assert await value(JsonSchema(schema=schema, fenced=True), text) == 1.0
    assert await value(JsonSchema(schema=schema), text) == 0.0, "only if `fenced` is set"
    assert json_object(text) == {"city": "Rome"}, "a judge's verdict is read in the same way"


@pytest.mark.parametrize("inside", ['{"code": "```py\\nx\\n```"}', '["```"]', '["~~~", "````"]', '"```"', "true", "7", "[\n1,\n\n2]"])
@pytest.mark.parametrize("fence", ["```", "~~~", "`````"])
def test_fences_in_strings_and_all_kinds_of_json_are_kept(inside: str, fence: str) -> None:
    for text in (f"{fence}json\n{inside}\n{fence}", f"{fence}{inside}{fence}", f"{fence}\n{inside}"):
        assert json.loads(strip_code_fence(text, "json")) == json.loads(inside), text


@pytest.mark.parametrize(
    "text",
    [
        J,
        f"Here it is:\n```json\n{J}\n```",
        f"```json\n{J}\n```\nAs you wished.",
        f"```json\n{J}\n```\n```json\n{J}\n```",
        f"```json\n{J}\n```\n\n~~~\n{J}\n~~~",
        f"``{J}``",
        "",
    ],
)
async def test_other_text_is_unchanged(text: str) -> None:
    assert strip_code_fence(text, "json") == text
    if text != J:
        assert await value(JsonSchema(schema={"type": "object"}, fenced=True), text) == 0.0
        with pytest.raises(Unreadable):
            json_object(text)


@given(st.text(alphabet="`~ \n\r\tjson{}\"'", max_size=40), st.sampled_from(["```", "~~~", "```json", ""]))
def test_any_text_is_accepted_and_nested_blocks_are_kept(text: str, fence: str) -> None:
    stripped = strip_code_fence(f"{fence}\n{text}" if fence else text, "json")
    assert len(stripped) <= len(text) + len(fence) + 1
    assert strip_code_fence(f"``````````\n{text}\n``````````") == text.strip() or "``````````" in text


def test_byte_order_mark_is_stripped() -> None:
    assert answer_of(episode("\ufeff 7 \ufeff\n")) == ("7", "")
    assert answer_of(episode("\ufeff")) == ("", "the answer is empty")


# Parsing of reward files, which any program in the sandbox may have written.
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
    reward, problem = parse_reward(txt, as_json)
    assert reward == value and bool(problem) == (value is None)


@pytest.mark.parametrize("txt", ["passed", "nan", "inf", "-1", "1.01", "1 1", "9" * 5000])
def test_invalid_text_earns_0(txt: str) -> None:
    assert parse_reward(txt, None)[0] == 0.0 and "reward.txt" in parse_reward(txt, None)[1]


@pytest.mark.parametrize(
    "as_json",
    ["", "1", "[1]", "{}", '{"reward": true}', '{"reward": "1"}', '{"reward": NaN}', '{"a": 1, "b": 1}', "[" * 99999, '{"reward": 2}'],
)
def test_invalid_json_earns_0(as_json: str) -> None:
    assert parse_reward(None, as_json)[0] == 0.0 and "reward.json" in parse_reward(None, as_json)[1]
