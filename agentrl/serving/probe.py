"""The logprob probe: compares a server's logprobs for a few token rows with the learner's, which are in a version's folder
(`probe.json`)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.errors import ServingError, SwapError
from agentrl.records import Probe, codec
from agentrl.records.images import plain_ids, without_end
from agentrl.records.sampling import TIES, Sampling
from agentrl.serving.client import parse_alternatives, proven_support, sampling_parameters
from agentrl.serving.control import ControlPlane
from agentrl.serving.server import PROBE_PRIORITY, VLLMServer

PROBE_FILE = "probe.json"


def probe_limit(dtype: str, *, gpu: bool) -> float:
    """Returns the largest logprob difference (nats) that rounding can cause. A wrong tensor changes logprobs by several nats.

    On a GPU, vLLM multiplies float32 numbers with the precision of TF32. In bfloat16, the logprobs of unlikely tokens differ most: by up to
    0.4 nats on an H200, and on a CPU by up to 0.8 nats from the same rounded weights in float32 (recipes/models/tables-base).
    """
    if dtype == "float32":
        return 0.05 if gpu else 1e-3
    return 1.0


def read_probe(folder: Path) -> Probe | None:
    """Returns the learner's logprobs in a version's folder, or None if the folder contains no probe. Raises `ServingError` if the file is
    unreadable."""
    try:
        return codec.from_json(Probe, (folder / PROBE_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ServingError(f"{folder / PROBE_FILE} cannot be read: {error}") from error


async def max_logprob_difference(server: VLLMServer, number: int, probe: Probe) -> float:
    """Returns the largest absolute difference (nats) between the server's and the learner's logprobs, or inf if a logprob is not finite.

    Rows are truncated to the server's context, which may be shorter than that of the run that trained the model.

    Raises `SwapError` if a response has no logprobs or comes from a version other than `number`, and `ServingError` if there is no response
    or the server expanded the images of a row differently.
    """
    sampling = server.recipe.rollout.distribution
    if probe.temperature is not None:
        sampling = replace(sampling, temperature=probe.temperature)
    rows = [without_end(ids, server.max_tokens - 1) for ids in probe.token_ids]  # the server samples one more token
    answers = await asyncio.gather(*(_row_answer(server, ids, sampling) for ids in rows))
    differences: list[float] = []
    for answer, ids, ours in zip(answers, rows, probe.logprobs, strict=True):
        if server.images is not None:
            server.images.check(answer, ids)
        theirs = parse_prompt_logprobs(answer, tuple(plain_ids(ids)), number)
        differences += (abs(server - learner) for server, learner in zip(theirs, ours[: len(ids) - 1], strict=True))
    is_whole = [ids == row for ids, row in zip(rows, probe.token_ids, strict=True)]
    for answer, whole, next_ids, next_logprobs in zip(answers, is_whole, probe.next_ids, probe.next_logprobs, strict=False):
        if whole:
            differences += next_token_differences(answer, dict(zip(next_ids, next_logprobs, strict=True)), sampling, number)
    return max((d if math.isfinite(d) else math.inf for d in differences), default=0.0)


async def judge_logprob_difference(control: ControlPlane, model: str, probe: Probe, *, max_model_len: int, timeout_s: float) -> float:
    """Returns the largest logprob difference, as `max_logprob_difference` does, but for a judge's chat model, over the rows' tokens within
    its context.

    Raises `ServingError` if the server fails or its response is malformed.
    """
    differences: list[float] = []
    for row, ours in zip(probe.token_ids, probe.logprobs, strict=True):
        ids = row[: max_model_len - 1]  # the server samples one more
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = await control.request("POST", "/v1/completions", timeout_s=timeout_s, json=body)
        try:
            theirs = _of_prompt(answer["choices"][0]["prompt_logprobs"], ids)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServingError(f"malformed response to the logprob probe of {model}: {error!r}") from error
        differences += (abs(server - learner) for server, learner in zip(theirs, ours, strict=False))
    return max((d if math.isfinite(d) else math.inf for d in differences), default=0.0)


def _of_prompt(positions: Any, token_ids: Sequence[int]) -> list[float]:
    """Returns the logprobs of tokens 1..T-1. Raises `KeyError`, `TypeError` or `ValueError` if the response contains no logprobs."""
    return [float(entry[str(token)]["logprob"]) for token, entry in zip(token_ids[1:], positions[1:], strict=True)]


async def _row_answer(server: VLLMServer, token_ids: tuple[int, ...], sampling: Sampling) -> Any:
    """Returns the server's response for a row: the logprobs of its tokens, and one token sampled after it, with the likeliest alternatives.

    The logprobs are at temperature 1, without truncation or prefix caching. The token is sampled as in rollouts.
    """
    logprobs = {"prompt_logprobs": 0, "logprobs": sampling.top_k + TIES}
    body = {
        "token_ids": list(token_ids),
        "sampling_params": {"max_tokens": 1, **sampling_parameters(sampling), **logprobs, "detokenize": False},
        "cache_salt": server.weights.cache_salt,
        "priority": PROBE_PRIORITY,  # episodes wait for the result
    }
    if server.images is not None:
        body |= server.images.fields(token_ids, server.weights.cache_salt)
    return await server.control.generate(body, timeout_s=server.recipe.serving.request_timeout_s)


def parse_prompt_logprobs(answer: Any, token_ids: tuple[int, ...], number: int) -> list[float]:
    """Returns the logprobs of tokens 1..T-1 in vLLM's response. Raises `SwapError` if the response is malformed or comes from a different
    version than `number`."""
    try:
        spans = answer["choices"][0]["weight_versions"]
        logprobs = _of_prompt(answer["prompt_logprobs"], token_ids)
        versions = {span["version"] for span in spans}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SwapError(f"version {number}: malformed response to the logprob probe: {error!r}") from error
    if versions != {str(number)}:
        raise SwapError(f"the server answered the probe of version {number} with versions {sorted(versions)}")
    return logprobs


def next_token_differences(answer: Any, ours: Mapping[int, float], sampling: Sampling, number: int) -> list[float]:
    """Returns the differences (nats) between server and learner for the token after a row, with the sampling settings of rollouts. Raises
    `SwapError` if the response is malformed.

    The learner's distribution is restricted to the support that the server returns, as in training. A supported token that the learner did
    not list is at most as likely as the last listed token. The difference of such a token is the excess of
    the server's logprob over that of the last listed token, or 0 if there is none.

    Args:
        answer: the server's response, with one sampled token.
        ours: the learner's logprobs of the most likely tokens, before truncation.
    """
    floor = min(ours.values(), default=0.0)
    try:
        (table,) = parse_alternatives(answer)
        theirs = proven_support(table, sampling.top_k + TIES) if sampling.truncated else table
    except (ServingError, ValueError) as error:
        raise SwapError(f"version {number}: malformed response to the logprob probe: {error}") from error
    total = _log_sum_exp([ours.get(token, floor) for token in theirs]) if sampling.truncated else 0.0
    gaps = {token: logprob - (ours.get(token, floor) - total) for token, logprob in theirs.items()}
    return [abs(gap) if token in ours else max(gap, 0.0) for token, gap in gaps.items()]


def _log_sum_exp(values: Sequence[float]) -> float:
    largest = max(values)
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values))
