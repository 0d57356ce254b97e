"""The text of the measured episodes, and the script file of the server.

An episode has `TURNS` turns: a tool call in each but the last, which is the answer. The text consists of random words of one or two
syllables, about one token each. Both sides get the same prompt, the same tool with the same results, and completions of the same tokens.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.agent import ChatFormat
from agentrl.records import Message
from benchmarks.gateway import trained_tokenizer, words

PROMPT_WORDS, SAID_WORDS, SHOWN_WORDS = 150, 50, 60
GENERATE, CHAT = "/inference/v1/generate", "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The texts of the episode, the same in every call."""

    prompt: str
    turns: int
    calls: tuple[str, ...]  # argument of the tool call of each turn except the last
    said: tuple[str, ...]  # the text of each turn
    shown: str  # the tool's output

    @classmethod
    def of(cls, turns: int) -> Script:
        draw = random.Random(7)
        calls = tuple(words(draw, 3) for _ in range(turns - 1))
        said = tuple(words(draw, SAID_WORDS) for _ in range(turns))
        return cls(prompt=words(draw, PROMPT_WORDS), turns=turns, calls=calls, said=said, shown=words(draw, SHOWN_WORDS))

    def text(self, turn: int) -> str:
        """Returns the model's text of a turn."""
        if turn >= len(self.calls):
            return self.said[turn]
        call = json.dumps({"name": "look", "arguments": {"at": self.calls[turn]}})
        return f"{self.said[turn]}<tool_call>\n{call}\n</tool_call>"


def tokenizer() -> Any:
    """Returns the tokenizer of the gateway's benchmark, with about one token per word. The peer's renderer needs the thinking marks."""
    trained = trained_tokenizer()
    trained.add_special_tokens({"extra_special_tokens": [*trained.all_special_tokens, "<think>", "</think>"]})
    return trained


def write(folder: Path, script: Script, schema: dict[str, Any], *, delay_s: tuple[float, float] = (0.0, 0.0), delay_from: int = 0) -> int:
    """Writes the server's file and the tokenizer into a folder. Returns the number of tokens of an episode, with its prompt."""
    trained = tokenizer()
    trained.save_pretrained(folder / "tokenizer")
    chat = ChatFormat(trained)
    tokens = len(chat.opening((Message(role="user", content=script.prompt),), (schema,)))
    answers: dict[str, list[str]] = {GENERATE: [], CHAT: []}
    for turn in range(script.turns):
        ids = [*trained.encode(script.text(turn), add_special_tokens=False), trained.eos_token_id]
        answers[GENERATE].append(json.dumps(_generated(ids)))
        answers[CHAT].append(json.dumps(_chat(script, turn, tokens, len(ids))))
        tokens += len(ids)
        if turn < len(script.calls):
            tokens += len(chat.tool_delta([script.shown], chat.parse(ids, (schema,))))
    episode = {"prompt": script.prompt, "schema": schema, "shown": script.shown}
    content = {"answers": answers, "delay_s": delay_s, "delay_from": delay_from, "end": trained.eos_token_id, "episode": episode}
    (folder / "script.json").write_text(json.dumps(content))
    return tokens


def _generated(ids: list[int]) -> dict[str, Any]:
    """Returns a response of vLLM's `/inference/v1/generate`. `token` is the key of older vLLM versions, which the peer reads."""
    content = [
        {
            "token": f"token_id:{token}",
            "token_id": token,
            "logprob": -0.5,
            "rank": 1,
            "top_logprobs": [{"token_id": token, "logprob": -0.5, "rank": 1}],
        }
        for token in ids
    ]
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    }
    return {"request_id": "r", "created": 0, "choices": [choice], "prompt_logprobs": None}


def _chat(script: Script, turn: int, prompt: int, sampled: int) -> dict[str, Any]:
    """Returns a response of vLLM's chat completions."""
    call = turn < len(script.calls)
    message: dict[str, Any] = {"role": "assistant", "content": script.said[turn], "refusal": None}
    if call:
        function = {"name": "look", "arguments": json.dumps({"at": script.calls[turn]})}
        message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
    return {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if call else "stop", "logprobs": None}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }
