"""A scripted policy with the speed of a server, which may change, stall, or be shared by many requests."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.errors import ServingError
from agentrl.records import CUT, Completion, SamplingParams, VersionSpan

TICK_S = 0.5
_EPSILON_S = 1e-6
_LOGPROB = -0.5


class PacedPolicy:
    """Samples the letter `x` until a turn has its planned number of tokens, then ends the turn. Use it with `run_virtually`.

    Args:
        tokenizer: tokenizer of the sampled ids.
        wants: returns the number of tokens of a turn, including its end, by episode id and turn number.
        speed: tokens per second of one request, by the time of the event loop and the requests in flight; 0: a stalled server.
        cuts: whether it returns the tokens so far at a deadline, as the policy's servers do, or ignores deadlines.
        dies: whether a request fails, by the time of the event loop.
        reading: prompt tokens per second; tokens that were computed earlier for the episode take no time.
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
        """Samples at the current speed."""
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
