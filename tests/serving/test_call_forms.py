"""vLLM's own parsers of tool calls as an independent reference: what a form means is not only what is read here."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from agentrl.agent.forms import FORMS, deepseek
from agentrl.testing import byte_tokenizer
from tests.agent.test_form_grammars import WRITERS, Arguments, schemas_of

THEIRS = {name: form for name, (form, _) in WRITERS.items() if name not in ("mistral_v3", "harmony")}
"""Way of writing -> name of vLLM's parser. It reads Mistral's lists and harmony by their own tokenizers alone."""

TOGETHER: list[list[Arguments]] = [
    [{"code": "print('\u00e9')\nx < 1\n", "a": 3, "b_2": True}, {"code": "3.10", "a": [1, {"b": None}], "b_2": -0.5}],
    [{"code": "", "a": "null", "b_2": {"<b>": "</b>"}}],
    [{"code": "if a:\n    return [1, {2}]  # \U0001f600"}, {"a": 10**12, "b_2": []}],
    [{}, {"a": "1"}],
]


@cache
def tokenizer() -> Any:
    made = byte_tokenizer()
    special = [*deepseek.CALLS, *deepseek.CALL, deepseek.SEP, "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
    made.add_special_tokens({"extra_special_tokens": [*made.all_special_tokens, *special]})
    tags = ("tool_call", "think", "arg_key", "arg_value")
    made.add_tokens([*(f"<{tag}>" for tag in tags), *(f"</{tag}>" for tag in tags)])
    return made


@pytest.mark.vllm
@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("every", TOGETHER, ids=range(len(TOGETHER)))
def test_calls_are_read_as_vllm_reads_them(name: str, every: list[Arguments]) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    form, write = WRITERS[name]
    tools = schemas_of(every)
    asked = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "-"}], tools=tools)
    parser = ToolParserManager.get_tool_parser(THEIRS[name])(tokenizer(), asked.tools)
    made = parser.extract_tool_calls(write(every), asked)
    theirs = [(call.function.name, json.loads(call.function.arguments)) for call in made.tool_calls]
    ours = FORMS[form].read(write(every), tools)
    assert [(call.name, dict(call.arguments)) for call in ours.calls] == theirs and ours.errors == ()
    assert len(theirs) == len(every)
