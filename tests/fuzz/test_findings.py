"""Every input that once broke a target is handled now. `python -m tests.fuzz TARGET --replay FILE` shows the error of an input."""

from __future__ import annotations

import gc
import json
import struct
from pathlib import Path

import pytest

from agentrl.errors import ServingError, UserError
from agentrl.records import Episode, ExecResult, SamplingParams, SandboxSpec
from agentrl.reward.cleanroom import CleanRoom
from agentrl.sandbox.images import load_image
from agentrl.serving.client import parse_completion
from agentrl.serving.control import parse_weight_version
from agentrl.task.description import TaskDescription, parse_toml
from agentrl.task.grading import GRADING_KEY, Grading, encode_files
from agentrl.testing.sandboxes import ScriptedSandbox, ScriptedSandboxes, sample_task
from agentrl.version.weight_files import tensor_shapes
from tests.fuzz import mutators
from tests.fuzz.catalog import find
from tests.fuzz.child import attempt

ANSWER: dict[str, object] = {
    "token_ids": [3],
    "logprobs": {"content": [{"token_id": 3, "logprob": -0.5}]},
    "weight_versions": [{"version": "12", "start": 0, "end": 1}],
    "finish_reason": "stop",
}


def far_future() -> bytes:
    """An archive whose one file was changed in a year that takes twelve octal digits."""
    archive = bytearray(mutators.archive([("a", b"0", b"x")]))
    archive[136:148] = b"7" * 12
    archive[148:156] = b" " * 8
    archive[148:156] = b"%06o\0 " % sum(archive[:512])
    return bytes(archive)


ENDLESS = {"version": "1" * 4301, "start": 0, "end": 1}
FAR = {"version": "1", "start": 0, "end": 1 << 63}
FINDINGS = {
    "a report that is a number": ("grading", b"judge\nsecret 1\n"),
    "a report of a test without a name": ("grading", b'judge\nsecret {"loaded": []}\nsecret {}\n'),
    "a report without tests": ("grading", b'shell\nsecret {"tests": 1}\n'),
    "a report nested too deeply": ("grading", b"judge\nsecret " + b"[" * 3000 + b"\n"),
    "half a surrogate pair in a report": ("grading", b'shell\nsecret {"tests": {"test.sh": "\\udc80"}}\n'),
    "a reward that is a list": ("grading", b'harbor\nsecret {"exit": 0, "txt": [], "json": null}\n'),
    "an exit status that is an object": ("grading", b'harbor\nsecret {"exit": {"\\udc80": 1}, "txt": "1", "json": null}\n'),
    "a report without a reward": ("grading", b"harbor\nsecret {}\n"),
    "image.toml with an endless number": ("tasks", b"judged/image.toml\nsuite = " + b"9" * 5000),
    "image.toml nested too deeply": ("tasks", b"judged/image.toml\nsuite = " + b"[" * 3000),
    "task.toml nested too deeply": ("tasks", b"judged/one/task.toml\nmetadata = " + b"[" * 3000),
    "a number of turns that no record holds": ("tasks", b'judged/one/task.toml\noutputs = ["a"]\n[agent]\nturns = 1' + b"0" * 40),
    "a test nested too deeply": ("tasks", b"judged/one/tests/test_sum.py\ndef test_a(): " + b"-" * 9000 + b"1\n"),
    "a test of one endless chain": ("tasks", b"judged/one/tests/test_sum.py\nx" + b".a" * 9000 + b"\n"),
    "a header nested too deeply": ("weights", b"model.safetensors\n" + struct.pack("<Q", 3000) + b"[" * 3000),
    "a config.json of lists": ("weights", b'config.json\n{"model_type": "a", "architectures": 1.5, "num_attention_heads": 2}'),
    "a config.json of texts": ("weights", b'config.json\n{"model_type": "a", "text_config": [1], "num_attention_heads": 2}'),
    "a context that is a list": ("weights", b'config.json\n{"model_type": "a", "num_heads": 2, "max_position_embeddings": [[]]}'),
    "a vocabulary that is a list": ("weights", b'config.json\n{"model_type": "a", "num_heads": 2, "vocab_size": [[]]}'),
    "a quantization that is a list": ("weights", b'config.json\n{"model_type": "a", "num_heads": 2, "quantization_config": [1]}'),
    "a scaling that is a number": ("weights", b'config.json\n{"model_type": "a", "num_heads": 2, "rope_scaling": 1.5}'),
    "a config.json nested too deeply": ("weights", b"config.json\n" + b"[" * 3000),
    "a token without a number": ("weights", b'tokenizer.json\n{"added_tokens": [{}]}'),
    "a token that is a list": ("weights", b'tokenizer.json\n{"model": {"vocab": {"a": [], "b": 1}}}'),
    "a vocabulary that is a number": ("weights", b'tokenizer.json\n{"model": {"vocab": 7}}'),
    "a shard with an endless name": ("weights", b'model.safetensors.index.json\n{"weight_map": {"a": "' + b"x" * 3000 + b'"}}'),
    "a name with a zero byte in an archive": ("archive", mutators.archive([("a\0b", b"0", b"x"), ("n" * 120 + "\0", b"0", b"x")])),
    "a time of more digits than a snapshot writes": ("archive", far_future()),
    "a version with endless digits": ("completions", json.dumps({"choices": [{**ANSWER, "weight_versions": [ENDLESS]}]}).encode()),
    "an answer nested too deeply": ("completions", b"[" * 3000),
    "a place of more than 63 bits": ("completions", json.dumps({"choices": [{**ANSWER, "weight_versions": [FAR]}]}).encode()),
}


@pytest.fixture(scope="module")
def collected_garbage() -> None:
    """Collects the garbage of other tests and freezes their live objects, so that collections in these tests are fast."""
    gc.collect()
    gc.freeze()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("finding", FINDINGS)
def test_an_earlier_finding_is_handled(finding: str, tmp_path: Path, collected_garbage: None) -> None:
    name, data = FINDINGS[finding]
    gc.collect()  # a finalizer that runs while the stack is exhausted reports it, and pytest cannot handle that
    assert attempt(find(name).prepare(tmp_path), data) is None


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000, "{a=" * 3000])
def test_toml_that_python_cannot_read_is_a_user_error(value: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is (not TOML|nested too deep)"):
        parse_toml(TaskDescription, f"version = {value}")
    (tmp_path / "image.toml").write_text(f"suite = {value}")
    with pytest.raises(UserError, match=r"image\.toml is (not TOML|nested too deep)") as raised:
        load_image(tmp_path, cache=tmp_path)
    assert raised.value.fix


@pytest.mark.parametrize("shape", ["[1.5]", "[-1]", '"ab"', "[true]", "{}", "null"])
def test_an_invalid_shape_raises(shape: str, tmp_path: Path) -> None:
    text = f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 4]}}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        tensor_shapes([tmp_path / "model.safetensors"])


@pytest.mark.parametrize(
    "fields",
    [
        {"weight_versions": [ENDLESS]},
        {"weight_versions": [FAR]},
        {"weight_versions": [{"version": "٣", "start": 0, "end": 1}]},
        {"token_ids": [1 << 64], "logprobs": {"content": [{"token_id": 1 << 64, "logprob": -0.5}]}},
    ],
)
def test_a_number_out_of_range_is_a_serving_error(fields: dict[str, object]) -> None:
    params = SamplingParams(max_tokens=4)
    assert parse_completion({"choices": [ANSWER]}, params).versions[0].version == 12
    with pytest.raises(ServingError):
        parse_completion({"choices": [ANSWER | fields]}, params)


@pytest.mark.parametrize("answer", [None, [], "3", {}, {"weight_version": 3}])
def test_an_answer_without_a_version_is_a_serving_error(answer: object) -> None:
    with pytest.raises(ServingError, match="returned no version"):
        parse_weight_version(answer)
    assert parse_weight_version({"weight_version": "default"}) == "default"


async def test_a_compromised_grader_cannot_leave_an_episode_unscored() -> None:
    """If tests and code under test share a sandbox, code that forges the report must score 0 and cause no fault."""
    plan = Grading(mode="shell", tests=encode_files({"test.sh": b"true\n"}), timeout_s=5.0)
    task = sample_task(sandbox=SandboxSpec(image="-"), data={GRADING_KEY: plan.model_dump(mode="json")}, outputs=("a",))
    episode = Episode(id="e", task_id="t", task_key=task.key, trajectories=(), outputs={"a": b"x"})
    for report in ("1", "[]", "{}", '{"tests": 3}', '{"tests": {"test.sh": null}}', '{"tests": {"test.sh": ""}, "x": ' + "[" * 3000):
        score = await CleanRoom()(task, episode, ReportingSandboxes(report))
        assert score.value == 0.0, report
    assert (await CleanRoom()(task, episode, ReportingSandboxes('{"tests": {"test.sh": ""}}'))).value == 1.0


class ReportingSandboxes(ScriptedSandboxes):
    """Sandboxes whose programs report `text` with the secret of the grader."""

    def __init__(self, text: str) -> None:
        super().__init__(lambda code: ExecResult(exit_code=0, stdout="", stderr="", wall_s=0.0))
        self.text = text

    async def open(self, *_: object, **__: object) -> ScriptedSandbox:
        return _Reporting(self.text)


class _Reporting(ScriptedSandbox):
    def __init__(self, text: str) -> None:
        super().__init__("reporting", lambda code: ExecResult(exit_code=0, stdout="", stderr="", wall_s=0.0), {})
        self.text = text

    async def exec(self, argv: object, *, stdin: bytes = b"", **_: object) -> ExecResult:
        return ExecResult(exit_code=0, stdout=f"{json.loads(stdin)['secret']} {self.text}\n", stderr="", wall_s=0.0)
