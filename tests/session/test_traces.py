"""Traces of real rollouts at a collector for OTLP, and the cost of an absent or silent collector."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.observe import RunTracker, background, traces
from agentrl.observe.background import BackgroundTracker
from agentrl.records import (
    Episode,
    Group,
    GroupUse,
    Message,
    Parent,
    Score,
    ScoredEpisode,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    VersionSpan,
    codec,
)
from agentrl.run import loop
from agentrl.session.traces import exporters_wanted, open_traces
from tests.driving import ROOT, Family, Journaled, make_recipe, opened, scripted

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME", traces.CONTENT)
SECRET = "sk-live-4711"


class Collector:
    """Receives OTLP over HTTP, and parses it with the messages of the protocol."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.raw = b""
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportTraceServiceRequest()
                request.ParseFromString(body)
                collector.raw += body
                for part in request.resource_spans:
                    collector.resources.append(attributes(part.resource))
                    collector.spans += [span for scope in part.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def named(self, start: str) -> list[Any]:
        return [span for span in self.spans if span.name.startswith(start)]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        collector.server.server_close()
        thread.join()


def attributes(message: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for attribute in message.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        values[attribute.key] = [getattr(item, item.WhichOneof("value")) for item in value.values] if kind == "array_value" else value
    return values


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, ["otlp"]),
        ({"OTEL_TRACES_EXPORTER": "console"}, ["console"]),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ["otlp", "console"]),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, []),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, []),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "a=b"}, []),
    ],
)
def test_the_standard_variables_enable_traces(environment: dict[str, str], names: list[str]) -> None:
    assert exporters_wanted(environment) == names


OFF = """
import asyncio, sys
from pathlib import Path
from agentrl.observe import RunTracker
from agentrl.session.opening import open_traces
from agentrl.run import loop
from tests.driving import Family, Journaled, make_recipe, opened, scripted

async def main(folder):
    trackers = open_traces(make_recipe(), folder, alert=print)
    async with opened(folder, Journaled(folder / "j"), scripted(folder / "j"), make_recipe(), Family()) as run:
        run.tracker = RunTracker(folder / "t", trackers)
        await loop._roll_out(run)
    return trackers

assert asyncio.run(main(Path(sys.argv[1]))) == []
print(sorted(name for name in sys.modules if name.startswith(("opentelemetry", "agentrl.observe.traces"))))
"""


@pytest.mark.slow
def test_traces_cost_nothing_when_they_are_off(tmp_path: Path) -> None:
    """The run has no tracker for traces, does no work per episode, and imports nothing of OpenTelemetry."""
    result = subprocess.run([sys.executable, "-c", OFF, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[]\n"


async def roll_out_groups(folder: Path, tracker: RunTracker | None = None) -> tuple[Group, ...]:
    """Rolls out two groups of three attempts, each with three tool calls and a submission. The learner used the first group."""
    recipe = make_recipe()
    async with opened(folder, Journaled(folder / "j"), scripted(folder / "j"), recipe, Family()) as run:
        if tracker is not None:
            run.tracker = tracker
        await loop._roll_out(run)
        uses = {0: GroupUse(tokens_trained=7), 1: GroupUse(reason="all_equal: scores 1")}
        await run.store.call(lambda store: store.commit(0, uses, "checkpoints/000001"))
        return await run.store.groups([0, 1])


@pytest.mark.slow
async def test_a_collector_receives_a_trace_for_each_episode_and_a_span_for_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        opened_traces = open_traces(make_recipe(), tmp_path, alert=pytest.fail)
        tracker = RunTracker(tmp_path / "t", opened_traces)
        groups = await roll_out_groups(tmp_path, tracker)
        tracker.log(1, {"reward_mean": 1.0, "step_s": 2.0, "timeline/server/busy": 1.0})
        await asyncio.to_thread(tracker.close)
    assert opened_traces[0].dropped == 0
    assert all(resource == {**resource, "service.name": "agentrl", "agentrl.run": tmp_path.name} for resource in collector.resources)
    roots = {attributes(span)["gen_ai.conversation.id"]: span for span in collector.named("invoke_agent")}
    episodes = {scored.episode.id: scored.episode for group in groups for scored in group.episodes}
    assert roots.keys() == episodes.keys() and len(roots) == 6
    (step,) = collector.named("train 1")
    for name, root in roots.items():
        spans = [span for span in collector.spans if span.trace_id == root.trace_id]
        kinds = sorted(span.name.split()[0] for span in spans)
        assert kinds == sorted(["invoke_agent", *["chat"] * 4, *["execute_tool"] * 4, "score", "train"])
        assert {span.parent_span_id for span in spans} == {b"", root.span_id} and len({span.span_id for span in spans}) == len(spans)
        (train_span,) = [span for span in spans if span.name == "train"]
        assert [(link.trace_id, link.span_id) for link in train_span.links] == [(step.trace_id, step.span_id)]
        group = int(name[1:7])
        assert attributes(train_span)["agentrl.trained"] is (group == 0) and attributes(root)["agentrl.group"] == group
        turns = sorted((span for span in spans if span.name == "chat m"), key=lambda span: span.start_time_unix_nano)
        recorded = episodes[name].trajectories[0].turns
        context = 0
        for span, turn in zip(turns, recorded, strict=True):
            context += len(turn.prompt_ids)
            values = attributes(span)
            assert (values["gen_ai.usage.input_tokens"], values["gen_ai.usage.output_tokens"]) == (context, len(turn.completion_ids))
            assert values["gen_ai.operation.name"] == "chat" and values["gen_ai.response.finish_reasons"] == [turn.finish_reason]
            context += len(turn.completion_ids)
        for span in spans:
            assert span.start_time_unix_nano <= span.end_time_unix_nano
            if span.name != "train":
                assert root.start_time_unix_nano <= span.start_time_unix_nano and span.end_time_unix_nano <= root.end_time_unix_nano
    assert {(link.trace_id, link.span_id) for link in step.links} == {(root.trace_id, root.span_id) for root in roots.values()}
    assert attributes(step)["agentrl.reward_mean"] == 1.0
    assert step.end_time_unix_nano - step.start_time_unix_nano == pytest.approx(2e9, rel=0.01)
    for text in (b"Take notes for", b"os.urandom", b"done"):
        assert text not in collector.raw, "content is exported on request only"


def long_episode(turns: int) -> ScoredEpisode:
    def turn(number: int) -> Turn:
        calls = (ToolCall(name="shell", arguments={"command": SECRET}),) * 3
        return Turn(
            prompt_ids=(1, 2),
            completion_ids=(3,),
            logprobs=(-0.1,),
            versions=(VersionSpan(version=7, start=0, end=1),),
            message=Message(role="assistant", content=f"\x1b[2J{SECRET}", tool_calls=calls),
            finish_reason="stop",
            tool_results=tuple(ToolResult(name="x" * 5000, output=SECRET, ok=False, wall_s=0.1) for _ in calls),
            tool_s=0.1,
            generate_s=0.5,
            ended_at=1000.0 + number,
        )

    trajectory = Trajectory(agent="main", turns=tuple(turn(number) for number in range(turns)))
    episode = Episode(id=f"g000003-0-a0{'y' * 5000}", task_id="t", task_key="k", trajectories=(trajectory,), wall_s=float(turns))
    return ScoredEpisode(episode=episode, score=Score(value=None, reason=SECRET))


def export_traces(tmp_path: Path, groups: list[Group], **recipe: Any) -> BackgroundTracker:
    async def run() -> BackgroundTracker:
        (tracker,) = open_traces(make_recipe(), tmp_path, alert=pytest.fail)
        for group in groups:
            tracker.progress(group.index, group)
        await asyncio.to_thread(tracker.close)
        return tracker

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("content", [False, True])
def test_an_episode_has_bounded_spans_with_content_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bool) -> None:
    group = Group(index=3, task_id="t", task_key="k", episodes=(long_episode(200),))
    group = codec.from_json(Group, codec.to_json(group))  # as from a rollout worker
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine")
        if content:
            monkeypatch.setenv(traces.CONTENT, "true")
        export_traces(tmp_path, [group])
    (root,) = collector.named("invoke_agent")
    assert len(collector.spans) == traces.MAX_SPANS
    assert attributes(root)["agentrl.spans_dropped"] == 2 + 200 * 4 - traces.MAX_SPANS
    assert collector.resources[0]["service.name"] == "mine"
    (score,) = collector.named("score")
    assert score.status.code == 2 and "gen_ai.evaluation.score.value" not in attributes(score)
    for span in collector.spans:
        assert len(span.name) < 300 and all(len(str(value)) <= traces.MAX_CONTENT for value in attributes(span).values())
    chat = collector.named("chat")[0]
    assert len(chat.links) == 1, "the version that sampled it"
    first, second, third = collector.named("execute_tool")[:3]
    assert first.start_time_unix_nano == second.start_time_unix_nano == third.start_time_unix_nano, "they ran in parallel"
    assert attributes(first)["error.type"] == "tool_error"
    assert (SECRET.encode() in collector.raw) is content
    assert not any("\x1b" in str(value) for span in collector.spans for value in (span.name, *attributes(span).values()))
    if content:
        (message,) = json.loads(attributes(chat)["gen_ai.output.messages"])
        assert message["parts"][0]["content"].endswith(SECRET) and len(message["parts"]) == 4
        assert attributes(first)["gen_ai.tool.call.result"] == SECRET


@pytest.mark.slow
def test_a_sub_agent_whose_call_has_no_span_belongs_to_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = long_episode(3)
    (main,) = scored.episode.trajectories
    inherited, cut, complete = main.turns
    main = replace(main, turns=(inherited, replace(cut, tool_results=()), complete), inherited=("g000001-0-a0",))
    helpers = (replace(main, agent="helper", parent=Parent(trajectory=0, turn=turn, call=1)) for turn in range(3))
    scored = replace(scored, episode=replace(scored.episode, trajectories=(main, *helpers)))
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        export_traces(tmp_path, [Group(index=3, task_id="t", task_key="k", episodes=(scored,))])
    spans = {span.span_id: span for span in collector.spans}
    (root,) = collector.named("invoke_agent main")
    parents = [spans[span.parent_span_id] for span in collector.named("invoke_agent helper")]
    assert parents[:2] == [root, root] and parents[2].name.startswith("execute_tool")
    assert all(span.parent_span_id in spans for span in collector.spans if span is not root)


@pytest.mark.slow
def test_a_sampler_from_the_environment_selects_complete_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
        template = long_episode(1)
        names = [f"g{number:06d}-0-a0" for number in range(40)]
        episodes = tuple(replace(template, episode=replace(template.episode, id=name)) for name in names)
        export_traces(tmp_path, [Group(index=0, task_id="t", task_key="k", episodes=episodes)])
    by_trace: dict[bytes, int] = {}
    for span in collector.spans:
        by_trace[span.trace_id] = by_trace.get(span.trace_id, 0) + 1
    assert 4 < len(by_trace) < 36 and set(by_trace.values()) == {6}


@contextmanager
def silent_server() -> Iterator[int]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


@contextmanager
def closed_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
    yield number


@pytest.mark.slow
@pytest.mark.parametrize("absent", [silent_server, closed_port])
async def test_an_absent_collector_does_not_delay_a_run_and_raises_one_alert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, absent: Any
) -> None:
    monkeypatch.setattr(background, "MAX_GROUPS", 4)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    alerts: list[str] = []
    group = Group(index=3, task_id="t", task_key="k", episodes=(long_episode(20),) * 4)
    with absent() as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        (tracker,) = open_traces(make_recipe(), tmp_path, alert=alerts.append)
        started = time.monotonic()
        for _ in range(200):
            tracker.progress(3, group)
        assert time.monotonic() - started < 0.5, "the run does not wait"
        for _ in range(100):
            await asyncio.sleep(0.1)
            if alerts:
                break
        tracker.progress(3, group)
        closing_at = time.monotonic()
        await asyncio.to_thread(tracker.close)
        assert time.monotonic() - closing_at < 6.0
        await asyncio.sleep(0)
    assert len(alerts) == 1 and "spans are dropped" in alerts[0] and "OTEL_EXPORTER_OTLP_ENDPOINT" in alerts[0]
    assert tracker.dropped >= 100, "groups that did not fit into the queue"
    assert any("spans were not exported" in record.message for record in caplog.records)
    assert sum("opentelemetry" in record.name for record in caplog.records) == 0, "failed exports are not logged one by one"


@pytest.mark.slow
async def test_an_unknown_exporter_is_an_error_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "smoke-signals")
    with pytest.raises(UserError, match=r"no trace exporter 'smoke-signals'"):
        open_traces(make_recipe(), tmp_path, alert=print)


async def test_the_error_for_a_missing_package_has_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    with pytest.raises(UserError, match=r"needs the package opentelemetry.*\n.*pip install .*opentelemetry"):
        open_traces(make_recipe(), tmp_path, alert=print)
