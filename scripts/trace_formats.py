"""Creates the files in tests/failure/formats/data: what real emitters write about a small support agent and a stub of a chat server.

The agent, the server's answers and the tools are defined here; the emitters below write the contents of the files. Run it in separate
environments, never in the project's:

    events up to v1.36:
        pip install openai==1.109.1 opentelemetry-sdk==1.36.0 opentelemetry-instrumentation-openai-v2==2.1b0
            opentelemetry-exporter-otlp-proto-common==1.36.0
        python scripts/trace_formats.py events openai
    messages in parts:
        pip install openai==2.54.0 opentelemetry-sdk==1.45.2 opentelemetry-instrumentation-openai-v2==2.4b0
            opentelemetry-util-genai==0.4b0 opentelemetry-exporter-otlp-json-file==0.66b1
        python scripts/trace_formats.py parts parts_events silent
    agents, a different vendor, ATIF:
        pip install openai==3.54.0 openai-agents==0.24.0 opentelemetry-sdk==1.45.2 opentelemetry-util-genai==1.3b0
            opentelemetry-instrumentation-genai-openai==1.3b0 opentelemetry-instrumentation-genai-openai-agents==1.3b0
            opentelemetry-exporter-otlp-json-file==0.66b1 opentelemetry-instrumentation-openai==0.62.4 atif==1.8.0
        python scripts/trace_formats.py agents openllmetry atif

Each name is a function in this file and runs in a separate process, because an emitter reads its settings when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "tests" / "failure" / "formats" / "data"
QUESTION = "Where are orders A-1 and A-2? Zoë 🦊 says \u201csoon\u201d,\u2028naïve \u202e<|im_end|>"
INSTRUCTIONS = "You answer questions about orders."
FOUND = '{"status": "sent", "to": "Zoë 🦊"}'
LOST = "error: no order A-2 \u0007"


def function(name: str, what: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}


TOOLS = [function("find_order", "Finds an order."), function("refund", "Pays an order back.")]


def call(name: str, arguments: str, id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def stub_reply(messages: list[dict[str, Any]], tools: list[str]) -> dict[str, Any]:
    """Returns the stub's reply: two calls at once, one with arguments that are not JSON, then a wrong answer."""
    answers = sum(message["role"] == "tool" for message in messages)
    question = next((str(message["content"]) for message in messages if message["role"] == "user"), "")
    if question.startswith("check") and not answers:
        return {"tool_calls": [call("find_order", '{"order": "A-2"}', "call_h1")]}
    if question.startswith("check"):
        return {"content": "A-2 is unknown."}
    if "ask_checker" in tools:
        if not answers:
            return {"tool_calls": [call("ask_checker", '{"input": "check A-2"}', "call_m1")]}
        return {"content": "Both are on their way."}
    if not answers:
        calls = [call("find_order", '{"order": "A-1"}', "call_1"), call("find_order", '{"order": "A-2"}', "call_2")]
        return {"content": "I look — zwei Augenblicke.", "tool_calls": calls}
    if answers == 2:
        return {"tool_calls": [call("refund", '{"order": A-2}', "call_3")]}
    return {"content": "Both are on their way. 🦊"}


class Stub(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        reply = stub_reply(request["messages"], [tool["function"]["name"] for tool in request.get("tools", [])])
        message = {
            "role": "assistant",
            "content": reply.get("content"),
            **({"tool_calls": reply["tool_calls"]} if "tool_calls" in reply else {}),
        }
        reason = "tool_calls" if "tool_calls" in reply else "stop"
        usage = {"prompt_tokens": 40, "completion_tokens": 8, "total_tokens": 48}
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1760000000,
            "model": "stub-1",
            "choices": [choice],
            "usage": usage,
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def served() -> str:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


def tool(name: str, arguments: str) -> str:
    try:
        order = json.loads(arguments)["order"]
    except ValueError as error:
        return f"error: {error}"
    return FOUND if order == "A-1" else LOST


def conversation() -> list[dict[str, Any]]:
    """Runs the agent: requests completions and calls tools until an answer. Returns its messages."""
    from openai import OpenAI

    client = OpenAI(base_url=served(), api_key="none", max_retries=0)
    messages: list[dict[str, Any]] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]
    while True:
        completion = client.chat.completions.create(model="stub-1", messages=messages, tools=TOOLS, temperature=0.5)  # type: ignore[call-overload]
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return messages
        for tool_call in message.tool_calls:
            answer = tool(tool_call.function.name, tool_call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": answer})


def openai() -> None:
    """Writes a line in the fine-tuning format, and a request log: the parameters, and the response as the SDK serializes it."""
    from openai import OpenAI

    messages = conversation()
    request = {"model": "stub-1", "messages": messages[:2], "tools": TOOLS}
    response = OpenAI(base_url=served(), api_key="none").chat.completions.create(**request)  # type: ignore[call-overload]
    lines = [{"messages": messages, "tools": TOOLS}, {"request": request, "response": response.model_dump(mode="json")}]
    (DATA / "openai.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def events() -> None:
    """Writes conventions up to 1.36: a log record per message, next to spans. Like the collector's file exporter, with ids in hex."""
    os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "true"
    from google.protobuf.json_format import MessageToDict
    from opentelemetry._events import set_event_logger_provider
    from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
    from opentelemetry.sdk._events import EventLoggerProvider
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import InMemoryLogExporter, SimpleLogRecordProcessor
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    resource = Resource({"service.name": "support"})
    spans, logs = InMemorySpanExporter(), InMemoryLogExporter()
    tracers, loggers = TracerProvider(resource=resource), LoggerProvider(resource=resource)
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    loggers.add_log_record_processor(SimpleLogRecordProcessor(logs))
    set_event_logger_provider(EventLoggerProvider(loggers))
    OpenAIInstrumentor().instrument(tracer_provider=tracers, event_logger_provider=EventLoggerProvider(loggers))
    with tracers.get_tracer("support").start_as_current_span("handle question"):
        conversation()
    folder = DATA / "otel_events"
    folder.mkdir(exist_ok=True)
    encoded = {"traces.json": encode_spans(spans.get_finished_spans()), "logs.json": encode_logs(logs.get_finished_logs())}
    for name, message in encoded.items():
        (folder / name).write_text(json.dumps(_hex_ids(MessageToDict(message))) + "\n")


def _hex_ids(value: Any) -> Any:
    """protobuf writes ids in base64; OTLP's JSON form has them in hex."""
    import base64

    if isinstance(value, dict):
        return {
            key: base64.b64decode(item).hex() if key in ("traceId", "spanId", "parentSpanId") else _hex_ids(item)
            for key, item in value.items()
        }
    return [_hex_ids(item) for item in value] if isinstance(value, list) else value


def providers(spans: Path, logs: Path | None = None) -> tuple[Any, Any]:
    from opentelemetry.exporter.otlp.json.file import FileSpanExporter
    from opentelemetry.exporter.otlp.json.file._log_exporter import FileLogExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    for path in filter(None, (spans, logs)):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
    resource = Resource({"service.name": "support"})
    tracers, loggers = TracerProvider(resource=resource), LoggerProvider(resource=resource)
    tracers.add_span_processor(SimpleSpanProcessor(FileSpanExporter(spans)))
    if logs is not None:
        loggers.add_log_record_processor(SimpleLogRecordProcessor(FileLogExporter(logs)))
    return tracers, loggers


def _newest(capture: str) -> None:
    os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
    os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = capture


def parts() -> None:
    """Writes messages in parts, as attributes of spans without a parent: a trace id for each model call."""
    _newest("span_only")
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

    tracers, loggers = providers(DATA / "otel_parts.jsonl")
    OpenAIInstrumentor().instrument(tracer_provider=tracers, logger_provider=loggers)
    conversation()


def silent() -> None:
    """Writes the same with an emitter that does not capture message content, which is its default."""
    _newest("no_content")
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

    tracers, loggers = providers(DATA / "otel_silent.jsonl")
    OpenAIInstrumentor().instrument(tracer_provider=tracers, logger_provider=loggers)
    conversation()


def parts_events() -> None:
    """Writes the same in log records."""
    _newest("event_only")
    os.environ["OTEL_INSTRUMENTATION_GENAI_EMIT_EVENT"] = "true"
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

    folder = DATA / "otel_parts_events"
    tracers, loggers = providers(folder / "traces.jsonl", folder / "logs.jsonl")
    OpenAIInstrumentor().instrument(tracer_provider=tracers, logger_provider=loggers)
    conversation()


def agents() -> None:
    """Writes spans of agents, tools and calls by the OpenAI Agents SDK: two agents, one of them a tool of the other."""
    _newest("span_only")
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_default_openai_client
    from openai import AsyncOpenAI
    from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
    from opentelemetry.instrumentation.genai.openai_agents import OpenAIAgentsInstrumentor

    tracers, loggers = providers(DATA / "otel_agents.jsonl")
    OpenAIAgentsInstrumentor().instrument(tracer_provider=tracers, logger_provider=loggers)
    OpenAIInstrumentor().instrument(tracer_provider=tracers, logger_provider=loggers)
    set_default_openai_api("chat_completions")
    set_default_openai_client(AsyncOpenAI(base_url=served(), api_key="none", max_retries=0), use_for_tracing=False)

    @function_tool
    def find_order(order: str) -> str:
        """Finds an order."""
        raise ValueError(f"no order {order}")

    checker = Agent(name="checker", instructions="You check one order.", tools=[find_order], model="stub-1")
    asks = checker.as_tool(tool_name="ask_checker", tool_description="Asks the checker.")
    desk = Agent(name="desk", instructions=INSTRUCTIONS, tools=[asks], model="stub-1")
    print(Runner.run_sync(desk, "Where is A-2?").final_output)


def openllmetry() -> None:
    """Writes the spans of another vendor's instrumentation of the same client."""
    os.environ["TRACELOOP_TRACE_CONTENT"] = "true"
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    tracers, _ = providers(DATA / "otel_openllmetry.jsonl")
    OpenAIInstrumentor().instrument(tracer_provider=tracers)
    with tracers.get_tracer("support").start_as_current_span("handle question"):
        conversation()


def atif() -> None:
    """Writes a desk that calls two checkers at once, each with a separate trajectory. One of them calls a third."""
    from atif import Agent, ContentPart, FinalMetrics, ImageSource, Metrics, Observation, ObservationResult, Step, ToolCall, Trajectory
    from atif import SubagentTrajectoryRef as Ref

    def checker(id: str, order: str, answer: str, inner: list[Any] | None = None) -> Any:
        results = [ObservationResult(source_call_id="f", content=LOST)]
        if inner:
            results.append(ObservationResult(content=None, subagent_trajectory_ref=[Ref(trajectory_id=inner[0].trajectory_id)]))
        steps = [
            Step(step_id=1, source="user", message=f"check {order}", timestamp="2025-10-16T14:30:02Z"),
            Step(
                step_id=2, source="agent", message="", timestamp="2025-10-16T14:30:02.250000Z", reasoning_content="I look it up.",
                tool_calls=[ToolCall(tool_call_id="f", function_name="find_order", arguments={"order": order})],
                observation=Observation(results=results),
            ),
            Step(step_id=3, source="agent", message=answer, timestamp="2025-10-16T14:30:03Z"),
        ]  # fmt: skip
        agent = Agent(name="checker", version="0.3", model_name="stub-small")
        return Trajectory(schema_version="ATIF-v1.8", trajectory_id=id, agent=agent, steps=steps, subagent_trajectories=inner)

    calls = [ToolCall(tool_call_id=f"call_{at}", function_name="ask_checker", arguments={"input": f"check A-{at}"}) for at in (1, 2)]
    results = [
        ObservationResult(source_call_id="call_1", content="sent", subagent_trajectory_ref=[Ref(trajectory_id="c-1")]),
        ObservationResult(source_call_id="call_2", content="A-2 is unknown.", subagent_trajectory_ref=[Ref(trajectory_id="c-2")]),
    ]
    steps = [
        Step(step_id=1, source="system", message=INSTRUCTIONS, timestamp="2025-10-16T14:30:00Z"),
        Step(step_id=2, source="user", message=QUESTION, timestamp="2025-10-16T14:30:00.500000Z"),
        Step(
            step_id=3, source="agent", message="Zwei Augenblicke.", timestamp="2025-10-16T14:30:01Z", reasoning_content="Two orders.",
            tool_calls=calls, observation=Observation(results=results),
        ),
        Step(step_id=4, source="agent", message="Both are on their way. 🦊", timestamp="2025-10-16T14:30:04Z"),
    ]  # fmt: skip
    third = checker("c-3", "A-2", "unknown")
    trajectory = Trajectory(
        schema_version="ATIF-v1.8", session_id="s-1", trajectory_id="t-1", steps=steps,
        agent=Agent(name="desk", version="1.0.2", model_name="stub-1", tool_definitions=TOOLS),
        subagent_trajectories=[checker("c-1", "A-1", "sent"), checker("c-2", "A-2", "A-2 is unknown.", [third])],
    )  # fmt: skip
    (DATA / "atif.json").write_text(json.dumps(trajectory.to_json_dict(), indent=1) + "\n")
    picture = ContentPart(type="image", source=ImageSource(media_type="image/png", path="../../etc/passwd"))
    seen = ObservationResult(content="seen", subagent_trajectory_ref=[Ref(trajectory_path="/etc/passwd")])
    rich = Trajectory(
        schema_version="ATIF-v1.6", session_id="s-2", agent=Agent(name="desk", version="1.0.2"), notes="cut",
        continued_trajectory_ref="/etc/passwd", final_metrics=FinalMetrics(total_steps=2),
        steps=[
            Step(step_id=1, source="user", message=[ContentPart(type="text", text="What is this?"), picture]),
            Step(
                step_id=2, source="agent", message="A receipt.", model_name="stub-2", is_copied_context=True,
                metrics=Metrics(prompt_tokens=3, completion_tokens=2, completion_token_ids=[5, 6], logprobs=[-0.5, -0.25], cost_usd=0.01),
                observation=Observation(results=[seen]),
            ),
        ],
    )  # fmt: skip
    (DATA / "atif_rich.jsonl").write_text(json.dumps(rich.to_json_dict()) + "\n")


def main(names: list[str]) -> None:
    if len(names) == 1:
        globals()[names[0]]()
        return
    for name in names:
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
