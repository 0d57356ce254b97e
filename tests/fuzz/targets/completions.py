"""The inference server's answer to a completion request; a training sample relies on all of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ServingError
from agentrl.records import CUT, Completion, Message, SamplingParams, Turn, codec
from agentrl.serving.client import parse_completion
from agentrl.serving.control import decode_answer, parse_weight_version
from tests.fuzz import mutators
from tests.fuzz.target import Check, Target, must

PARAMS = SamplingParams(max_tokens=8)
TRUNCATED = SamplingParams(max_tokens=8, top_k=3, supports=True)


def prepare(scratch: Path) -> Check:
    def check(data: bytes) -> None:
        try:
            answer = decode_answer(200, data, "/generate")
            if isinstance(answer, dict) and "weight_version" in answer:
                must(isinstance(parse_weight_version(answer), str), "a version without a name")
        except ServingError as error:
            must(bool(str(error)), "an error without a message")
            return
        for params in (PARAMS, TRUNCATED):
            for cut in (False, True):
                _check(answer, params, cut=cut)

    return check


def _check(answer: Any, params: SamplingParams, *, cut: bool) -> None:
    try:
        completion = parse_completion(answer, params, cut=cut)
    except ServingError as error:
        must(bool(str(error)), "an error without a message")
        return
    count = len(completion.token_ids)
    must(completion.finish_reason != CUT or cut, "a completion marked as cut although nothing cut it")
    if completion.finish_reason == CUT and not count:
        return
    must(1 <= count <= params.max_tokens and all(math.isfinite(logprob) for logprob in completion.logprobs), "a completion out of range")
    must(codec.from_json(Completion, codec.to_json(completion)) == completion, "a completion changes when it is read back")
    if params.supports:
        must(completion.supports is not None and all(completion.supports.rows), "a token without the requested support")
    Turn(
        prompt_ids=(1,),
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        message=Message(role="assistant", content=""),
        finish_reason=completion.finish_reason,
        supports=completion.supports,
    )


def seeds() -> Sequence[bytes]:
    logprobs = {"content": [{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": 0.0}]}
    spans = [{"version": "0", "start": 0, "end": 1}, {"version": "12", "start": 1, "end": 2}]
    choice = {"token_ids": [3, 4], "logprobs": logprobs, "weight_versions": spans, "finish_reason": "stop"}
    out = {"token_id": 9, "logprob": -9999.0}
    likely = [{"token_id": 3, "logprob": -0.5, "top_logprobs": [{"token_id": 3, "logprob": -0.5}, {"token_id": 5, "logprob": -0.933}, out]}]
    likely += [{"token_id": 4, "logprob": 0.0, "top_logprobs": [{"token_id": 4, "logprob": 0.0}, out]}]
    answers = [
        {"choices": [choice]},
        {"choices": [{**choice, "logprobs": {"content": likely}}]},
        {"choices": [{**choice, "finish_reason": "abort"}]},
        {"choices": [{**choice, "token_ids": [], "finish_reason": "abort"}]},
        {"choices": []},
        {"error": "no"},
        {"weight_version": "3"},
    ]
    return [json.dumps(answer).encode() for answer in answers]


target = Target(
    name="completions",
    about="responses of the inference server",
    prepare=prepare,
    seeds=seeds,
    mutate=mutators.json_text,
    words=(
        b'"token_ids"',
        b'"top_logprobs"',
        b'"logprob"',
        b'"version"',
        b'"start"',
        b'"end"',
        b"-9999.0",
        b'"length"',
        b'"default"',
        b'"\xc2\xb2"',
        b"NaN",
    ),
)
