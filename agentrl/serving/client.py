"""The token client for an inference server: sends token ids, and returns token ids with logprobs and weight versions."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.errors import ServingError
from agentrl.records import CUT, Completion, SamplingParams, VersionSpan
from agentrl.records.sampling import MAX_SUPPORT, TIES, Sampling, Supports
from agentrl.serving.control import ControlPlane
from agentrl.serving.images import PromptImages
from agentrl.serving.server import VLLMServer
from agentrl.serving.transport import UnsentError
from agentrl.serving.weight_state import WeightState

_MAX_CONNECTIONS = 8192  # bounds the process's file descriptors; the recipe bounds the episodes
CUT_TIMEOUT_S = 30.0
"""Maximum number of seconds that a server may take to return the tokens of a request that is cut off."""
_CUT_AGAIN_S = 0.2
_ABORT = "abort"  # vLLM's finish reason for such a request
_CONNECT_TRIES = 3
_CONNECT_WAIT_S = 0.2
# vLLM returns -9999 for a logprob of NaN or minus infinity, which no sampled token can have.
_IMPOSSIBLE_LOGPROB = -9000.0
_SUM_TOLERANCE = 1e-3  # for the sum of a support's probabilities; float32 sums are within 1e-6
_VERSION = re.compile(r"[0-9]{1,18}")


class TokenClient:
    """A `Policy` on one vLLM server. The client keeps connections open and sends up to `max_connections` requests at once.

    Logprobs are those of the distribution that the token was drawn from: the server applies temperature and truncation first
    (`--logprobs-mode processed_logprobs`). At temperature 0, the most likely token is chosen, with its logprob at temperature 1.
    """

    def __init__(
        self,
        url: str,
        *,
        weights: WeightState,
        key: str = "",
        max_connections: int = _MAX_CONNECTIONS,
        answered: Callable[[], None] = lambda: None,
        images: PromptImages | None = None,
    ) -> None:
        """`answered` is called for each completion from the server. `images`: the run's images, if the model reads images."""
        self._answered, self._images = answered, images
        self._control = ControlPlane(url, key=key, max_connections=max_connections)
        self._weights = weights

    @classmethod
    def for_server(cls, server: VLLMServer) -> TokenClient:
        """Returns a client for a server."""
        return cls(server.url, weights=server.weights, key=server.key, answered=server.answered, images=server.images)

    async def close(self) -> None:
        """Closes all connections."""
        await self._control.close()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """Samples one completion of `prompt_ids`.

        After `timeout_s`, the server cuts the request off and returns the tokens sampled so far, with finish reason `CUT`. The server then
        has another `timeout_s` seconds to respond, but at least 2 and at most `CUT_TIMEOUT_S`. Raises `ServingError` if the server fails,
        returns an invalid response or does not respond within this time, or if the weights that sampled the tokens are rejected. Raises
        `InfrastructureError` if an image of the prompt cannot be read. Cancellation closes the connection, after which vLLM aborts the
        request. Only a request that never reached the server is retried, at most twice.
        """
        cutting: list[asyncio.Task[None]] = []

        def cut() -> None:
            cutting.append(asyncio.create_task(self._cut_off(request_id)))

        timer = asyncio.get_running_loop().call_later(timeout_s, cut)
        within_s = timeout_s + min(CUT_TIMEOUT_S, max(2.0, timeout_s))
        try:
            async with asyncio.timeout(within_s):
                answer = await self._send(lambda: self._body(prompt_ids, params, request_id), within_s)
                completion = parse_completion(answer, params, cut=bool(cutting))
                if completion.token_ids:
                    if self._images is not None:
                        self._images.check(answer, prompt_ids)
                    self._answered()
                await self._weights.wait_verified(span.version for span in completion.versions)
                return completion
        except TimeoutError:
            raise ServingError(f"request {request_id}: no completion within {timeout_s:g} s") from None
        finally:
            timer.cancel()
            for task in cutting:
                task.cancel()

    def _body(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str) -> dict[str, Any]:
        salt = self._weights.cache_salt
        body = generate_body(prompt_ids, params, request_id, salt)
        return body if self._images is None else body | self._images.fields(prompt_ids, salt)

    async def _cut_off(self, request_id: str) -> None:
        """Requests the abort repeatedly, because the server ignores the abort of a request that it has not started."""
        while True:
            await self._control.abort(request_id)
            await asyncio.sleep(_CUT_AGAIN_S)

    async def _send(self, body: Callable[[], dict[str, Any]], timeout_s: float) -> Any:
        for attempt in range(1, _CONNECT_TRIES):
            with contextlib.suppress(UnsentError):
                return await self._control.generate(body(), timeout_s=timeout_s)
            await asyncio.sleep(_CONNECT_WAIT_S * attempt)
        return await self._control.generate(body(), timeout_s=timeout_s)


def generate_body(prompt_ids: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str) -> dict[str, Any]:
    """Returns the JSON body for vLLM's `/inference/v1/generate`. Raises `ValueError` if the prompt is empty.

    There is no per-request seed, because vLLM 0.32's CPU engine crashes on a seeded request whose prefill is chunked.
    """
    if not prompt_ids:
        raise ValueError("prompt_ids is empty: a completion needs at least one token of context")
    sampling: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        **sampling_parameters(params),
        "stop_token_ids": list(params.stop_token_ids),
        "logprobs": params.top_k + TIES if params.supports else 0,  # 0: only the sampled token's
        **({"stop": list(params.stop)} if params.stop else {}),
        **({"structured_outputs": {"structural_tag": params.constraint}} if params.constraint else {}),
        "detokenize": bool(params.stop),  # only stop strings need it
    }
    return {
        "request_id": request_id,
        "token_ids": list(prompt_ids),
        "sampling_params": sampling,
        "cache_salt": cache_salt,
        "priority": request_priority(len(prompt_ids)),
    }


def request_priority(tokens: int) -> int:
    """Returns the scheduler's priority; requests with lower values are scheduled first. Long contexts are the most expensive to recompute
    if the KV cache is full."""
    return -tokens


def sampling_parameters(sampling: Sampling) -> dict[str, Any]:
    """Returns vLLM's sampling parameters. All parameters are explicit, so that a model's generation_config cannot change the meaning of
    logprobs."""
    return {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _TokenLogprob(_Answer):
    token_id: int
    logprob: float = Field(strict=False)


class _Logprobs(_Answer):
    content: list[_TokenLogprob]


class _Alternatives(_Answer):
    top_logprobs: list[_TokenLogprob] = Field(max_length=MAX_SUPPORT)


class _Span(_Answer):
    version: str
    start: int
    end: int


class _Choice(_Answer):
    token_ids: list[int] = Field(min_length=1)
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: str


class _Generated(_Answer):
    choices: list[_Choice] = Field(min_length=1, max_length=1)


def parse_completion(answer: Any, params: SamplingParams, *, cut: bool = False) -> Completion:
    """Returns the server's response as a record. Raises `ServingError` if the response is malformed, or if its tokens, logprobs or weight
    versions are inconsistent.

    `cut`: whether the request was cut off. If the request was cut off, the response may contain no tokens, and the finish reason "abort"
    becomes `CUT`.
    """
    if cut and _cut_at_once(answer):
        return Completion(token_ids=(), logprobs=(), versions=(), finish_reason=CUT)
    try:
        choice = _Generated.model_validate(answer).choices[0]
    except ValidationError as error:
        raise ServingError(f"malformed response from the inference server: {error}") from error
    if choice.finish_reason not in ("stop", "length", *((_ABORT,) if cut else ())):
        raise ServingError(f"the inference server ended the request with {choice.finish_reason!r}")
    try:
        if len(choice.token_ids) > params.max_tokens:
            raise ServingError(f"the server returned {len(choice.token_ids)} tokens, but at most {params.max_tokens} were requested")
        return Completion(
            token_ids=tuple(choice.token_ids),
            logprobs=_logprobs(choice),
            versions=_spans(choice),
            finish_reason=CUT if choice.finish_reason == _ABORT else choice.finish_reason,
            supports=_supports(answer, choice, params) if params.supports else None,
        )
    except ValueError as error:  # values that a record rejects
        raise ServingError(f"malformed response from the inference server: {error}") from error


def _cut_at_once(answer: Any) -> bool:
    """Whether a request was cut off before any token was sampled."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    return isinstance(choice, dict) and choice.get("finish_reason") == _ABORT and choice.get("token_ids") == []


def _logprobs(choice: _Choice) -> tuple[float, ...]:
    content = choice.logprobs.content
    if [entry.token_id for entry in content] != choice.token_ids:
        raise ServingError(f"the {len(content)} logprobs do not match the {len(choice.token_ids)} sampled tokens")
    for position, entry in enumerate(content):
        if not math.isfinite(entry.logprob) or entry.logprob < _IMPOSSIBLE_LOGPROB or entry.logprob > 1e-3:
            raise ServingError(f"impossible logprob {entry.logprob} for sampled token {position}: check that the weights are finite")
    return tuple(entry.logprob for entry in content)


def parse_alternatives(answer: Any) -> list[dict[int, float]]:
    """Returns a mapping token id -> requested logprob for each sampled token. Raises `ServingError` if the response is malformed."""
    try:
        content = answer["choices"][0]["logprobs"]["content"]
        rows = [_Alternatives.model_validate(entry).top_logprobs for entry in content]
    except (ValidationError, LookupError, TypeError) as error:
        raise ServingError(f"malformed response from the inference server: {error}") from error
    tables = [{entry.token_id: entry.logprob for entry in row} for row in rows]
    if any(len(table) != len(row) for table, row in zip(tables, rows, strict=True)):
        raise ServingError("the inference server returned a token twice in the logprobs of a position")
    return tables


def proven_support(table: dict[int, float], most: int) -> dict[int, float]:
    """Returns the entries of `table` whose tokens could have been sampled. Raises `ServingError` if tokens outside `table` could also have
    been sampled, or if the entries' probabilities do not add up to 1.

    Args:
        table: logprobs of the most likely tokens by id; outside the support, vLLM returns minus infinity, or -9999 over HTTP.
        most: the number of requested logprobs.
    """
    support = {token: logprob for token, logprob in table.items() if logprob > _IMPOSSIBLE_LOGPROB}
    if len(table) > most or len(support) == len(table):
        raise ServingError(
            f"{len(support)} of the {len(table)} most likely tokens could have been sampled, so there may be more: at least {TIES} tokens"
            " tie with the last of the top_k. Lower top_k or top_p, raise min_p, or compute in float32, where logits rarely tie"
        )
    total = math.fsum(math.exp(min(logprob, 1.0)) for logprob in support.values())
    if not abs(total - 1.0) <= _SUM_TOLERANCE:
        raise ServingError(f"the probabilities of the {len(support)} tokens of a support add up to {total:g}, not to 1")
    return support


def _supports(answer: Any, choice: _Choice, params: SamplingParams) -> Supports:
    """Returns the tokens that could have been sampled at each position.

    Raises `ServingError` if a support is incomplete or wrong, and `ValueError` for values that a record rejects.
    """
    rows = []
    for sampled, table in zip(choice.logprobs.content, parse_alternatives(answer), strict=True):
        support = proven_support(table, params.top_k + TIES)
        if support.get(sampled.token_id) != sampled.logprob:
            raise ServingError(f"sampled token {sampled.token_id} is not in its support, or has a different logprob there")
        rows.append(tuple(support))
    return Supports.from_rows(rows)


def _spans(choice: _Choice) -> tuple[VersionSpan, ...]:
    spans, edge = [], 0
    for span in choice.weight_versions:
        if span.start != edge or span.end <= span.start or not _VERSION.fullmatch(span.version):
            raise ServingError(f"the weight-version spans are not contiguous, numbered versions: {choice.weight_versions}")
        spans.append(VersionSpan(version=int(span.version), start=span.start, end=span.end))
        edge = span.end
    if edge != len(choice.token_ids):
        raise ServingError(f"weight-version spans cover {edge} of {len(choice.token_ids)} sampled tokens")
    return tuple(spans)
