"""Chat formats of popular models: their own templates with their own vocabularies, as far as packages contain them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.agent import ChatFormat
from agentrl.agent.rendering import Renderer
from agentrl.agent.template import read_template
from agentrl.agent.template_probe import turn_ends
from agentrl.errors import UserError
from agentrl.records import Message
from tests.agent import vocabularies as real
from tests.agent.conversations import Round, assert_adds_up, assert_marks_are_text, conversations, spelling_arguments, texts
from tests.strategies import examples

pytestmark = pytest.mark.models

FOUND = {
    "qwen2_5": ("hermes", 3, {"<|im_end|>"}),
    "qwen3": ("hermes", 3, {"<|im_end|>"}),
    "qwen3_instruct_2507": ("hermes", 3, {"<|im_end|>"}),
    "qwen3_5_think": ("qwen3_coder", 3, {"<|im_end|>"}),
    "qwen3_5_nothink": ("qwen3_coder", 3, {"<|im_end|>"}),
    "qwen3_6": ("qwen3_coder", 3, {"<|im_end|>"}),
    "llama3_2": ("llama3_json", 1, {"<|eot_id|>", "<|eom_id|>"}),
    "mistral_v3": ("mistral", 3, {"</s>"}),
    "deepseek_v3": ("deepseek_v3", 3, {f"<{real.BAR}end{real.GAP}of{real.GAP}sentence{real.BAR}>"}),
    "glm4moe": ("glm45", 3, {"<|endoftext|>", "<|observation|>", "<|user|>"}),
    "gptoss": ("harmony", 1, {"<|return|>", "<|call|>"}),
}
"""Template (TRL's or shipped) -> the form of its calls, the number of calls in a turn, and the tokens that end a turn."""

models = pytest.mark.parametrize("name", FOUND)


@cache
def tokenizer(name: str) -> Any:
    model_tokenizer: Any
    if name == "deepseek_v3":
        model_tokenizer = real.deepseek()
    elif name == "mistral_v3":
        model_tokenizer = real.tekken()
    elif name == "glm4moe":
        model_tokenizer = real.bytes_and(*real.GLM, eos="<|endoftext|>", plain=real.GLM_TAGS)
    elif name == "gptoss":
        model_tokenizer = real.bytes_and(*real.HARMONY, eos="<|return|>")
    elif name == "llama3_2":
        model_tokenizer = real.Ranked(encoding=real.llama3_vocabulary(), eos_token="<|eot_id|>", bos_token="<|begin_of_text|>")
    else:
        encoding = real.qwen35_vocabulary() if name[:7] in ("qwen3_5", "qwen3_6") else real.qwen_vocabulary()
        model_tokenizer = real.Ranked(encoding=encoding, eos_token="<|im_end|>", plain=real.QWEN_TAGS)
    model_tokenizer.chat_template = read_template(name, Path()) if name in ("deepseek_v3", "mistral_v3") else real.trl_template(name)
    return model_tokenizer


@cache
def chat(name: str) -> ChatFormat:
    return ChatFormat(tokenizer(name))


@models
def test_form_and_end_tokens_are_detected(name: str) -> None:
    form, _, ends = FOUND[name]
    assert chat(name).tool_format == form and chat(name).exact
    assert {tokenizer(name).decode([token]) for token in chat(name).stop_token_ids} == ends


@models
@settings(max_examples=examples(30))
@given(data=st.data())
def test_deltas_add_up_to_the_rendered_conversation(name: str, data: st.DataObject) -> None:
    prompt: str = data.draw(texts)
    rounds: list[Round] = data.draw(conversations(most_calls=FOUND[name][1]))
    assert_adds_up(chat(name), tokenizer(name), prompt, rounds)


REASONING, EARLIER = "it drops the model's reasoning", "it rewrites earlier turns when a turn is added"
WITHOUT_USER_DELTAS = {
    "qwen3": REASONING,
    "qwen3_5_think": EARLIER,
    "qwen3_5_nothink": EARLIER,
    "qwen3_6": EARLIER,
    "mistral_v3": EARLIER,
    "glm4moe": REASONING,
    "gptoss": "policy.model: its chat template does not end an assistant turn with '<|return|>'",
}
"""Template that changes earlier turns when a user message follows -> how it changes them."""


@models
@settings(max_examples=examples(30))
@given(data=st.data())
def test_deltas_of_user_messages_add_up_to_the_rendered_conversation(name: str, data: st.DataObject) -> None:
    assert chat(name).user_rewrite_reason == WITHOUT_USER_DELTAS.get(name, "")
    if name not in WITHOUT_USER_DELTAS:
        rounds: list[Round] = data.draw(conversations(most_calls=FOUND[name][1], users=True))
        assert_adds_up(chat(name), tokenizer(name), data.draw(texts), rounds)


@models
@settings(max_examples=examples(30))
@given(data=st.data())
def test_markup_in_arguments_stays_text(name: str, data: st.DataObject) -> None:
    call_arguments = data.draw(st.lists(spelling_arguments, min_size=1, max_size=FOUND[name][1]))
    assert_marks_are_text(chat(name), tokenizer(name), call_arguments)


@models
def test_reasoning_is_detected_and_ended_with_the_models_own_mark(name: str) -> None:
    thinking, vocabulary = chat(name).thinking, tokenizer(name)
    if name in ("llama3_2", "mistral_v3", "gptoss"):
        assert thinking is None, "these models have other marks, or none"
        return
    assert thinking is not None and vocabulary.decode(list(thinking.end)) == "\n</think>\n\n"
    assert "</think>" in [vocabulary.decode([token]) for token in thinking.end], "one token, as the model writes it"
    started, unmarked = (vocabulary.encode(text, add_special_tokens=False) for text in ("<think>\nhm", "hm"))
    assert thinking.unfinished(started) and not thinking.unfinished([*started, *thinking.end])
    assert thinking.unfinished(unmarked) == (name in ("qwen3_5_think", "qwen3_6")), "the prompts of these models start the thinking"


@models
def test_no_output_forges_a_turn(name: str) -> None:
    """Every control token of every vocabulary: complete, overlapping, and in unusual letters."""
    chat_format, control = chat(name), chat(name)._control_ids
    tokens = [str(token) for token in tokenizer(name).added_tokens_decoder.values() if not str(token).isspace()]
    expected = [token for token in chat_format.tool_delta(["1"]) if token in control]
    for text in ("".join(tokens), "".join(token[:-1] + token for token in tokens), " ".join(tokens).replace("|", "\uff5c")):
        assert [token for token in chat_format.tool_delta([text]) if token in control] == expected


@pytest.mark.parametrize("template", ["deepseekv3", "deepseek_r1_distill"])
def test_templates_that_drop_earlier_turns_raise(template: str) -> None:
    tokenizer_ = real.deepseek()
    tokenizer_.chat_template = real.trl_template(template)
    with pytest.raises(UserError, match="cannot be extended exactly: it rewrites earlier turns"):
        ChatFormat(tokenizer_)
    assert not ChatFormat(tokenizer_, rewritten="restart").exact


def test_mistral_ids_equal_those_of_its_own_package() -> None:
    from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    their_tokenizer = MistralTokenizer.from_file(str(real.folder("mistral_common") / "data" / "tekken_240911.json"))
    call = ToolCall(id="abcdefgh1", function=FunctionCall(name="f", arguments='{"a": "\u00e9"}'))
    turns = [
        UserMessage(content="q?"),
        AssistantMessage(content=None, tool_calls=[call]),
        ToolMessage(content="so it is", tool_call_id="abcdefgh1"),
    ]
    expected = their_tokenizer.encode_chat_completion(ChatCompletionRequest(messages=turns)).tokens
    chat_format, ours = chat("mistral_v3"), tokenizer("mistral_v3")
    completion = [*ours.encode('[TOOL_CALLS][{"name": "f", "arguments": {"a": "\u00e9"}, "id": "abcdefgh1"}]', add_special_tokens=False), 2]
    opening = chat_format.opening([Message(role="user", content="q?")], [])
    assert [*opening, *completion, *chat_format.tool_delta(["so it is"], chat_format.parse(completion))] == list(expected)


TURN_ENDS = {
    "qwen2_5": ("<|im_end|>",),
    "qwen3": ("<|im_end|>",),
    "qwen3_5_think": ("<|im_end|>",),
    "lfm2": ("<|im_end|>",),
    "nemotron_3_nano": ("<|im_end|>",),
    "llama3": ("<|eot_id|>",),
    "llama3_1": ("<|eot_id|>",),
    "llama3_2": ("<|eot_id|>",),
    "phi3": ("<|end|>",),
    "phi3_5": ("<|end|>",),
    "gemma": ("<end_of_turn>",),
    "gemma3": ("<end_of_turn>",),
    "gemma4_v5": ("<turn|>",),
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "cohere2": ("<|END_RESPONSE|>",),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gptoss": ("<|end|>",),
    "deepseekv3": (f"<{real.BAR}end{real.GAP}of{real.GAP}sentence{real.BAR}>",),
}
"""TRL's template of a family -> the tokens that it writes after a turn of the assistant (gpt-oss: after a message)."""
MARKUP = re.compile(r"<\|?[^\s<>|{}()'\"]{1,40}\|?>")


@pytest.mark.parametrize("name", TURN_ENDS)
def test_the_end_of_a_turn_is_detected_from_each_template(name: str) -> None:
    template, eos = real.trl_template(name), TURN_ENDS["deepseekv3"][0]
    control = {*MARKUP.findall(template), eos}
    model_tokenizer = real.bytes_and(*sorted(control), eos=eos, bos="<bos>")
    model_tokenizer.chat_template = template
    assert turn_ends(Renderer(model_tokenizer), control) == TURN_ENDS[name]


@pytest.mark.parametrize("name", ["gemma", "gemma3"])
def test_the_template_of_gemma_can_be_used(name: str) -> None:
    model_tokenizer = real.bytes_and("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", eos="<eos>", bos="<bos>")
    model_tokenizer.chat_template = real.trl_template(name)
    chat_format = ChatFormat(model_tokenizer)
    assert chat_format.exact and {model_tokenizer.decode([token]) for token in chat_format.stop_token_ids} == {"<eos>", "<end_of_turn>"}
    delta = model_tokenizer.decode(list(chat_format.tool_delta(["4"])))
    assert delta == "\n<start_of_turn>user\n<tool_response>\n4\n</tool_response><end_of_turn>\n<start_of_turn>model\n"
