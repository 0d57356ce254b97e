"""One session: a program in a bubblewrap sandbox, the gateway, a scripted policy, and the measured cell."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.agent import ChatFormat
from agentrl.gateway import ExternalProgram, Gateway
from agentrl.gateway.session import Session
from agentrl.objective import counted_samples
from agentrl.protocols import LiveEpisode, Sandbox
from agentrl.records import Completion, Episode, ExecResult, Group, Limits, Message, SandboxSpec, Score, ScoredEpisode, Split, Task
from agentrl.records.sampling import Sampling, SamplingParams
from agentrl.rollout import EpisodeRunner
from agentrl.sandbox import BubblewrapBackend
from agentrl.testing import ReadingPolicy, byte_tokenizer
from benchmarks.outside.program import PROMPT, PROTOCOLS, ROOT, Program, Says, Way

BROKEN = "def area(width, height):\n    return width + height\n"
TEST = "from area import area\n\nassert area(3, 4) == 12, area(3, 4)\nprint('passed')\n"
TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"  # before the messages, as templates show them
MAX_MODEL_LEN = 400_000  # bytes: the policy's tokenizer has a token for each
SHOWN = 3000  # characters of a program's output that are stored
_RESULT = re.compile(r"<\|im_start\|>user\n<tool_response>")

Exchange = tuple[str, str, bytes, int, bytes]
"""Method, path, body, status, and the answer if it is an error."""


class WithProgram(BubblewrapBackend):
    """Bubblewrap sandboxes that show one folder of this machine read-only at `/opt`, as an image with the program would."""

    def __init__(self, folder: Path) -> None:
        super().__init__(run_label="outside-programs", root=ROOT)
        self._folder = folder

    def _view(self, *arguments: Any, **options: Any) -> list[str]:
        return [*super()._view(*arguments, **options), "--ro-bind", str(self._folder), "/opt"]

    def _options(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        options = super()._options(*arguments, **named)
        return {**options, "shown": [*options["shown"], "/opt"]} if "shown" in options else options


@dataclass(slots=True, eq=False)
class RecordingGateway(Gateway):
    """A gateway that records its requests."""

    seen: list[Exchange] = field(default_factory=list)

    def _app(self) -> Any:
        inner = Gateway._app(self)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            body, answer, status = bytearray(), bytearray(), 0

            async def received() -> Any:
                message = await receive()
                body.extend(message.get("body", b""))
                return message

            async def sent(message: Any) -> None:
                nonlocal status
                status = message.get("status", status)
                if status >= 400:
                    answer.extend(message.get("body", b""))
                await send(message)

            await inner(scope, received, sent)
            if scope["type"] == "http":
                self.seen.append((scope["method"], scope["path"], bytes(body), status, bytes(answer)))

        return app


class Watched(ExternalProgram):
    """`ExternalProgram` with a recording gateway. Keeps the program's result and runs the task's test in the same sandbox."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.recording = RecordingGateway(host=self._host, port=self._port)
        self.session: Session | None = None
        self.ended: ExecResult | None = None
        self.tested: ExecResult | None = None

    def _gateway(self) -> Gateway:
        return self.recording

    async def _run(self, episode: LiveEpisode, session: Session, sandbox: Sandbox, key: str) -> ExecResult | None:
        self.session = session
        self.ended = await super()._run(episode, session, sandbox, key)
        self.tested = await sandbox.exec(["python3", "test_area.py"], timeout_s=20.0)
        return self.ended


class Competent(ReadingPolicy):
    """A scripted policy that records its prompts and completions. Raises `ValueError` if a constraint does not allow a completion."""

    def __init__(self, tokenizer: Any, says: Says) -> None:
        super().__init__(tokenizer, lambda prompt: says(prompt, len(_RESULT.findall(prompt))))
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.constrained = 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        completion = await super().generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
        self.sampled.append((tuple(prompt_ids), completion.token_ids))
        if params.constraint:
            self.constrained += 1
            text = self.tokenizer.decode(completion.token_ids[:-1])
            if not _is_allowed(text, params.constraint):
                raise ValueError(f"the script returned {text[:200]!r}, which the request does not allow: {params.constraint[:1000]}")
        return completion


def _is_allowed(text: str, constraint: str) -> bool:
    """Whether vLLM's guided decoding, which uses xgrammar, allows a completion."""
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    return bool(_is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(constraint), text))


def exact_share(episode: Episode, sampled: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> float:
    """Share of the sampled tokens that the samples train exactly once, after the ids that the policy was shown."""
    group = Group(index=0, task_id="t", task_key="k", episodes=(ScoredEpisode(episode=episode, score=Score(value=1.0)),))
    left, exact, trained = list(sampled), 0, 0
    for sample in counted_samples([group]):
        for begin, end in _spans(sample.loss_mask):
            before, ids = tuple(sample.token_ids[:begin]), tuple(sample.token_ids[begin:end])
            trained += len(ids)
            match = next((at for at, (prompt, completion) in enumerate(left) if prompt == before and completion[: len(ids)] == ids), None)
            if match is not None:
                exact += len(ids)
                del left[match]
    return exact / max(1, trained, episode.completion_tokens)


def _spans(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields start and end of each span of trained tokens."""
    edges = [at for at in range(1, len(mask)) if bool(mask[at]) != bool(mask[at - 1])]
    edges += [len(mask)] if mask[-1] else []
    yield from zip(edges[::2], edges[1::2], strict=True)


async def run(program: Program, way: Way, folder: Path, *, port: int, wall_s: float) -> tuple[dict[str, Any], list[Exchange]]:
    """One session. Returns the cell and the recorded requests."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLS + tokenizer.chat_template
    agent = Watched(
        chat=ChatFormat(tokenizer),
        command=way.command,
        environment=way.environment,
        files={name: str(path) for name, path in way.files.items()},
        models=program.models,
        answer="none",
        port=port,
    )
    policy, backend = Competent(tokenizer, program.says), WithProgram(folder.resolve())
    task = _task(agent.address, wall_s)
    runner = EpisodeRunner(
        agent=agent,
        policy=policy,
        sandboxes=backend,
        sampling=Sampling(),
        max_model_len=MAX_MODEL_LEN,
        request_timeout_s=60.0,
    )
    began = time.monotonic()
    try:
        await backend.prepare(task.sandbox)
        episode = await runner.run(task, episode_id=program.name)
    finally:
        await backend.close()
    return _measured(program, way, agent, policy, episode, time.monotonic() - began), agent.recording.seen


def _task(address: str, wall_s: float) -> Task:
    spec = SandboxSpec(image="sandboxes/tables", memory_mb=3072, processes=512, cpus=2.0, disk_mb=512, open_files=4096, network=(address,))
    return Task(
        id="repair",
        family="repair",
        prompt=(Message(role="user", content=PROMPT),),
        tools=(),
        sandbox=spec,
        files={"area.py": BROKEN, "test_area.py": TEST},
        verifiers=(),
        data={},
        split=Split.TRAIN,
        limits=Limits(turns=30, turn_tokens=4096, episode_tokens=MAX_MODEL_LEN, wall_s=wall_s),
    )


def _measured(program: Program, way: Way, agent: Watched, policy: Competent, episode: Episode, wall_s: float) -> dict[str, Any]:
    ended, tested, session, seen = agent.ended, agent.tested, agent.session, agent.recording.seen
    cell = {
        "program": program.name,
        "version": program.version,
        "column": way.column,
        "test_passed": tested is not None and tested.ok,
        "exact_share": exact_share(episode, policy.sampled),
        "sampled_tokens": episode.completion_tokens,
        "constrained": policy.constrained,
        "requests": dict(Counter(_kind(exchange) for exchange in seen)),
        "options": sorted({option for exchange in seen for option in options(exchange[2])}),
        "errors": [_error(exchange) for exchange in seen if exchange[3] >= 400],
        "trajectories": [[trajectory.agent, len(trajectory.turns)] for trajectory in episode.trajectories],
        "counts": {} if session is None else {key: count for key, count in session.counts.items() if count},
        "failures": [f"{fault.blame}: {fault.kind}: {fault.message}"[:SHOWN] for fault in episode.failures],
        "exit": None if ended is None else ended.exit_code,
        "output": "" if ended is None else ended.stdout[-SHOWN:] + ended.stderr[-SHOWN:],
        "wall_s": round(wall_s, 1),
    }
    return {**cell, "reason": reason(cell, program, way, "" if ended is None else ended.stdout)}


def reason(cell: dict[str, Any], program: Program, way: Way, stdout: str) -> str:
    """Returns why a cell is not OK; empty if it is OK."""
    if not cell["test_passed"] or cell["exit"] != 0:
        last = cell["output"].strip().rpartition("\n")[2] or next(iter(cell["failures"]), "")
        return next(iter(cell["errors"]), f"ended with status {cell['exit']}: {last[-300:]}")
    if program.prints not in stdout:
        return f"its output does not contain {program.prints!r}"
    if cell["exact_share"] != 1.0:
        return f"share of exact tokens {cell['exact_share']:.3f}"
    if not cell["requests"].get(f"{PROTOCOLS[way.protocol]} {'streamed' if way.stream else 'whole'}"):
        return f"it requests {', '.join(cell['requests'])}"
    return ""


def _body(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _kind(exchange: Exchange) -> str:
    method, path, body, _, _ = exchange
    if path not in PROTOCOLS.values():
        return f"{method} {path}"
    return f"{path} {'streamed' if _body(body).get('stream') else 'whole'}"


def _error(exchange: Exchange) -> str:
    method, path, _, status, answer = exchange
    error = _body(answer).get("error", {})
    return f"{method} {path} {status}: {error.get('message', '') if isinstance(error, dict) else error}"[:SHOWN]


def options(body: bytes) -> Iterator[str]:
    """Yields the fields of a request, with the value if the value matters."""
    fields = _body(body)
    for name, value in fields.items():
        if value is None or name in ("model", "messages", "input", "system", "instructions", "stream"):
            continue
        kind = value.get("type") or value.get("format", {}).get("type") if isinstance(value, dict) else value
        shown = name in ("tool_choice", "response_format", "text", "output_config", "thinking", "parallel_tool_calls", "store")
        yield f"{name}={kind}" if shown else name
    if any(isinstance(one, dict) and (one.get("strict") or (one.get("function") or {}).get("strict")) for one in fields.get("tools") or ()):
        yield "strict"


def run_session(program: Program, way: Way, folder: Path, *, port: int, wall_s: float) -> tuple[dict[str, Any], list[Exchange]]:
    return asyncio.run(run(program, way, folder, port=port, wall_s=wall_s))
