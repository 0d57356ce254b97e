"""Policies with scripted answers, and their tokenizer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from agentrl.records import Completion, SamplingParams, VersionSpan
from agentrl.records.sampling import Supports

_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def byte_tokenizer() -> Any:
    """A Hugging Face tokenizer of 256 bytes and the chat's control tokens, built in memory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=list(_SPECIAL)
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


class ScriptedPolicy:
    """Answers each request with the next text of a script, tokenized, with logprob -0.5 a token.

    If supports are requested, token t of a completion was drawn from 1 + t % top_k tokens: itself and the ids that follow.

    `script` gets the number of the turn in this episode (0, 1, ...) and the episode id. For the part of a turn after a bound on thinking,
    the id ends in ".answer". It returns the text, or raises like a failing server.
    """

    def __init__(self, tokenizer: Any, script: Callable[[int, str], str], *, version: int = 0) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.version = version
        self.prompts: list[tuple[int, ...]] = []

    @classmethod
    def saying(cls, tokenizer: Any, *texts: str) -> ScriptedPolicy:
        """Returns a policy that answers turn n of every episode with `texts[n]`."""
        return cls(tokenizer, lambda turn, _: texts[turn])

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """Returns the next text of the script."""
        self.prompts.append(tuple(prompt_ids))
        episode, _, turn = request_id.rpartition("-")
        number, part, name = turn.partition(".")
        said = await self._said(prompt_ids, int(number), f"{episode}{part}{name}")
        ids = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        finish = "stop" if len(ids) <= params.max_tokens else "length"
        taken = tuple(_take(iter(ids), params.max_tokens))
        spans = (VersionSpan(version=self.version, start=0, end=len(taken)),)
        supports = Supports.from_rows(self._support(place, token, params) for place, token in enumerate(taken)) if params.supports else None
        return Completion(token_ids=taken, logprobs=(-0.5,) * len(taken), versions=spans, finish_reason=finish, supports=supports)

    async def _said(self, prompt_ids: Sequence[int], turn: int, episode: str) -> str:
        return self.script(turn, episode)

    def _support(self, place: int, token: int, params: SamplingParams) -> list[int]:
        return [(token + after) % len(self.tokenizer) for after in range(1 + place % params.top_k)]


class ReadingPolicy(ScriptedPolicy):
    """A scripted policy that answers by context, so several agents of one episode may use it in any order.

    `reads` gets the text of the context, including control tokens, and returns the text of the turn; it may be async.
    """

    def __init__(self, tokenizer: Any, reads: Callable[[str], str | Awaitable[str]], *, version: int = 0) -> None:
        super().__init__(tokenizer, lambda turn, episode: "", version=version)
        self.reads = reads

    async def _said(self, prompt_ids: Sequence[int], turn: int, episode: str) -> str:
        said = self.reads(str(self.tokenizer.decode(list(prompt_ids))))
        return said if isinstance(said, str) else await said


class ReplayPolicy:
    """Answers each prompt with a token sequence, with logprob -0.5 a token, and stores nothing: for long sessions.

    `script` returns the ids for a prompt; the last one ends the turn.
    """

    def __init__(self, script: Callable[[Sequence[int]], Sequence[int]], *, version: int = 0) -> None:
        self.script = script
        self.version = version

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """Returns the recorded completion of a prompt."""
        ids = tuple(self.script(prompt_ids))
        taken = ids[: params.max_tokens]
        finish = "stop" if len(taken) == len(ids) else "length"
        spans = (VersionSpan(version=self.version, start=0, end=len(taken)),)
        return Completion(token_ids=taken, logprobs=(-0.5,) * len(taken), versions=spans, finish_reason=finish)


def _take(ids: Iterator[int], count: int) -> Iterator[int]:
    for _, token in zip(range(count), ids, strict=False):
        yield token
