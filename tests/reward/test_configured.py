"""`strip_code_fence`: what stands in an answer that is one fenced block, and every other text as it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.judge.verdict import Unreadable, json_object
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
async def test_one_block_is_what_stands_in_it(text: str) -> None:
    schema = {"type": "object", "required": ["city"]}
    assert json.loads(strip_code_fence(text, "json")) == {"city": "Rome"}
    assert await value(JsonSchema(schema=schema, fenced=True), text) == 1.0
    assert await value(JsonSchema(schema=schema), text) == 0.0, "only if it is allowed"
    assert json_object(text) == {"city": "Rome"}, "a judge's verdict is read alike"


@pytest.mark.parametrize("inside", ['{"code": "```py\\nx\\n```"}', '["```"]', '["~~~", "````"]', '"```"', "true", "7", "[\n1,\n\n2]"])
@pytest.mark.parametrize("fence", ["```", "~~~", "`````"])
def test_fences_in_strings_and_every_kind_of_json_are_kept(inside: str, fence: str) -> None:
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
async def test_anything_else_stays_as_it_is(text: str) -> None:
    assert strip_code_fence(text, "json") == text
    if text != J:
        assert await value(JsonSchema(schema={"type": "object"}, fenced=True), text) == 0.0
        with pytest.raises(Unreadable):
            json_object(text)


@given(st.text(alphabet="`~ \n\r\tjson{}\"'", max_size=40), st.sampled_from(["```", "~~~", "```json", ""]))
def test_any_text_is_read_and_a_block_in_a_block_stays(text: str, fence: str) -> None:
    found = strip_code_fence(f"{fence}\n{text}" if fence else text, "json")
    assert len(found) <= len(text) + len(fence) + 1
    assert strip_code_fence(f"``````````\n{text}\n``````````") == text.strip() or "``````````" in text


def test_a_byte_order_mark_is_no_part_of_an_answer() -> None:
    assert answer_of(episode("\ufeff 7 \ufeff\n")) == ("7", "")
    assert answer_of(episode("\ufeff")) == ("", "the answer is empty")
