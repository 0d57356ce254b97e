"""vLLM's tool-call parsers as an independent check of how calls are parsed."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from agentrl.agent.forms import FORMS, deepseek
from agentrl.testing import byte_tokenizer
from tests.agent.test_form_grammars import WRITERS, Arguments, schemas_of

VLLM_PARSERS = {name: form for name, (form, _) in WRITERS.items() if name not in ("mistral_v3", "harmony")}
"""Name of a writer -> name of vLLM's parser. vLLM parses Mistral's lists and harmony only with those models' tokenizers."""

CALL_LISTS: list[list[Arguments]] = [
    [{"code": "print('\u00e9')\nx < 1\n", "a": 3, "b_2": True}, {"code": "3.10", "a": [1, {"b": None}], "b_2": -0.5}],
    [{"code": "", "a": "null", "b_2": {"<b>": "</b>"}}],
    [{"code": "if a:\n    return [1, {2}]  # \U0001f600"}, {"a": 10**12, "b_2": []}],
    [{}, {"a": "1"}],
]


@cache
def tokenizer() -> Any:
    extended = byte_tokenizer()
    special = [*deepseek.CALLS, *deepseek.CALL, deepseek.SEP, "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
    extended.add_special_tokens({"extra_special_tokens": [*extended.all_special_tokens, *special]})
    tags = ("tool_call", "think", "arg_key", "arg_value")
    extended.add_tokens([*(f"<{tag}>" for tag in tags), *(f"</{tag}>" for tag in tags)])
    return extended


@pytest.mark.vllm
@pytest.mark.parametrize("name", VLLM_PARSERS)
@pytest.mark.parametrize("call_arguments", CALL_LISTS, ids=range(len(CALL_LISTS)))
def test_calls_are_read_as_vllm_reads_them(name: str, call_arguments: list[Arguments]) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    form, write = WRITERS[name]
    tools = schemas_of(call_arguments)
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "-"}], tools=tools)
    parser = ToolParserManager.get_tool_parser(VLLM_PARSERS[name])(tokenizer(), request.tools)
    extracted = parser.extract_tool_calls(write(call_arguments), request)
    expected = [(call.function.name, json.loads(call.function.arguments)) for call in extracted.tool_calls]
    parsed = FORMS[form].read(write(call_arguments), tools)
    assert [(call.name, dict(call.arguments)) for call in parsed.calls] == expected and parsed.errors == ()
    assert len(expected) == len(call_arguments)
