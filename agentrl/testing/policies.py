"""Policies with scripted turns or a scripted speed, and a tokenizer for them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from agentrl.errors import ServingError
from agentrl.records import CUT, Completion, SamplingParams, VersionSpan
from agentrl.records.sampling import Supports

TICK_S = 0.5
_EPSILON_S = 1e-6
_LOGPROB = -0.5

_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def byte_tokenizer(*more: str) -> Any:
    """Returns a Hugging Face tokenizer, built in memory, with the 256 bytes, the chat's control tokens and the control tokens `more`."""
    return byte_level_tokenizer(_TEMPLATE, pad="<|endoftext|>", more=[*_SPECIAL, *more])


def byte_level_tokenizer(template: str, *, pad: str, more: Sequence[str]) -> Any:
    """Returns a Hugging Face tokenizer with the 256 bytes and the special tokens `<|im_end|>`, `pad` and `more`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token=pad, extra_special_tokens=list(more))
    tokenizer.chat_template = template
    return tokenizer


class ScriptedPolicy:
    """Responds to each request with the script's text for its turn, tokenized and cut to `max_tokens`, with logprob -0.5 per token.

    If supports are requested, token t of a completion was drawn from 1 + t % top_k tokens: itself and the ids that follow.

    `script` receives the number of the turn in this episode (0, 1, ...) and the episode id. If an answer is sampled after thinking has
    reached its limit, the episode id passed to `script` ends in ".answer". The script returns the text, or raises the error of a failing
    server.
    """

    def __init__(self, tokenizer: Any, script: Callable[[int, str], str], *, version: int = 0) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.version = version
        self.prompts: list[tuple[int, ...]] = []

    @classmethod
    def saying(cls, tokenizer: Any, *texts: str) -> ScriptedPolicy:
        """Returns a policy whose turn n in every episode is `texts[n]`. Later turns raise `IndexError`."""
        return cls(tokenizer, lambda turn, _: texts[turn])

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """Returns the script's text for the turn."""
        self.prompts.append(tuple(prompt_ids))
        episode, _, turn = request_id.rpartition("-")
        number, part, name = turn.partition(".")
        answer = await self._said(prompt_ids, int(number), f"{episode}{part}{name}")
        ids = [*self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.eos_token_id]
        completion = _completion(ids, params, self.version)
        if not params.supports:
            return completion
        supports = (self._support(place, token, params) for place, token in enumerate(completion.token_ids))
        return replace(completion, supports=Supports.from_rows(supports))

    async def _said(self, prompt_ids: Sequence[int], turn: int, episode: str) -> str:
        return self.script(turn, episode)

    def _support(self, place: int, token: int, params: SamplingParams) -> list[int]:
        return [(token + after) % len(self.tokenizer) for after in range(1 + place % params.top_k)]


class ReadingPolicy(ScriptedPolicy):
    """A scripted policy whose turns depend on the context, so several agents in one episode may use it in any order.

    `reads` receives the text of the context, including control tokens, and returns the text of the turn. `reads` may be async.
    """

    def __init__(self, tokenizer: Any, reads: Callable[[str], str | Awaitable[str]]) -> None:
        super().__init__(tokenizer, lambda turn, episode: "")
        self.reads = reads

    async def _said(self, prompt_ids: Sequence[int], turn: int, episode: str) -> str:
        answer = self.reads(str(self.tokenizer.decode(list(prompt_ids))))
        return answer if isinstance(answer, str) else await answer


class ReplayPolicy:
    """Responds to each prompt with a token sequence, with logprob -0.5 per token. Stores nothing, so it is suitable for long sessions.

    `script` returns the token ids for a prompt. The last id ends the turn.
    """

    def __init__(self, script: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self.script = script

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """Returns the scripted completion of a prompt."""
        return _completion(self.script(prompt_ids), params, 0)


def _completion(ids: Sequence[int], params: SamplingParams, version: int) -> Completion:
    """Returns the completion for a turn with the tokens `ids`, cut to the request's `max_tokens`."""
    taken = tuple(ids[: params.max_tokens])
    spans = (VersionSpan(version=version, start=0, end=len(taken)),)
    finish = "stop" if len(taken) == len(ids) else "length"
    return Completion(token_ids=taken, logprobs=(_LOGPROB,) * len(taken), versions=spans, finish_reason=finish)


class PacedPolicy:
    """Samples the letter `x` until a turn has its planned number of tokens, then ends the turn. Use this policy with `run_virtually`.

    Args:
        tokenizer: tokenizer for the sampled ids.
        wants: returns the number of tokens in a turn, including the end token, given the episode id and the turn number.
        speed: returns the tokens per second of one request, given the time of the event loop and the number of requests in flight; 0 means
            a stalled server.
        cuts: whether the policy returns the tokens so far at a deadline, as the policy's servers do, instead of ignoring deadlines.
        dies: returns whether a request fails, given the time of the event loop.
        reading: prompt tokens per second. Tokens that were computed earlier for the episode take no time.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        wants: Callable[[str, int], int],
        speed: Callable[[float, int], float],
        cuts: bool = True,
        dies: Callable[[float], bool] = lambda now: False,
        reading: float = math.inf,
    ) -> None:
        self.tokenizer = tokenizer
        self.wants, self.speed, self.cuts, self.dies = wants, speed, cuts, dies
        self.reading = reading
        self._computed = Counter[str]()
        self.sampled = Counter[str]()  # tokens, by episode and turn
        self.in_flight = 0
        self._letter = int(tokenizer.encode("x", add_special_tokens=False)[0])

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """Samples at the current speed. Raises `ServingError` if `dies` returns True."""
        loop = asyncio.get_running_loop()
        name = request_id.partition(".")[0]
        episode, _, number = name.rpartition("-")
        wanted = self.wants(episode, int(number)) - self.sampled[name]
        most, sampled, began = min(wanted, params.max_tokens), 0.0, loop.time()
        unread_s = max(0, len(prompt_ids) - self._computed[episode]) / self.reading
        self.in_flight += 1
        try:
            while sampled < most and not (self.cuts and loop.time() - began >= timeout_s - _EPSILON_S):
                wait_s = min(TICK_S, timeout_s - (loop.time() - began)) if self.cuts else TICK_S
                speed = self.speed(loop.time(), self.in_flight)
                await asyncio.sleep(wait_s)
                reading_s = min(unread_s, wait_s)
                unread_s -= reading_s
                sampled += speed * (wait_s - reading_s)
                if self.dies(loop.time()):
                    raise ServingError("the server died")
        finally:
            self.in_flight -= 1
        count = min(most, int(sampled + 1e-6))
        self.sampled[name] += count
        self._computed[episode] = len(prompt_ids) + count - (int(unread_s * self.reading) if unread_s else 0)
        ended = count == wanted
        ids = (self._letter,) * (count - ended) + (int(self.tokenizer.eos_token_id),) * ended
        return Completion(
            token_ids=ids,
            logprobs=(_LOGPROB,) * count,
            versions=(VersionSpan(version=0, start=0, end=count),) if count else (),
            finish_reason="stop" if ended else "length" if count == params.max_tokens else CUT,
        )
