"""Agent libraries, each with a short program of the kind in its documentation (`drivers/`): a shell tool and a structured answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.outside.program import COLUMNS, LOOK, MEND, Program, Way, call, pip

DRIVERS = Path(__file__).parent / "drivers"
ANSWER: dict[str, Any] = {"file": "area.py", "passed": True}
PRINTS = "RESULT area.py True"
_ENVIRONMENT = {"PYTHONPATH": "/opt/lib", "DO_NOT_TRACK": "1"}


def ways(driver: str, columns: Iterable[str], *arguments: str, environment: Mapping[str, str] | None = None) -> tuple[Way, ...]:
    """The ways of a driver, which takes the protocol and the kind of answer as arguments."""
    return tuple(
        Way(
            protocol=protocol,
            stream=bool(streamed),
            command=("python3", "driver.py", protocol, streamed or "whole", *arguments),
            environment={**_ENVIRONMENT, **(environment or {})},
            files={"driver.py": DRIVERS / f"{driver}.py", "common.py": DRIVERS / "common.py"},
        )
        for protocol, _, streamed in (name.partition("-") for name in columns)
    )


def works(*, first: int = 0, answer: str = json.dumps(ANSWER)) -> Callable[[str, int], str]:
    """A policy that calls `shell` twice and then answers. `first`: results of other tools that come before."""

    def says(prompt: str, results: int) -> str:
        commands = (LOOK, MEND)
        at = results - first
        return call("shell", command=commands[at]) if at < len(commands) else answer

    return says


def hands_over(prompt: str, results: int) -> str:
    if "transfer_to_repairer" in prompt and results == 0:
        return call("transfer_to_repairer")
    return works(first=1)(prompt, results)


def answers_twice(prompt: str, results: int) -> str:
    """The library requests its output class after the last turn, as a call of a tool or as the format of an answer."""
    if '"Repair"' in prompt:
        return call("Repair", **ANSWER)
    return works()(prompt, 2 if "<current_conversation>" in prompt else results)


OPENAI_AGENTS = Program(
    name="openai-agents",
    version="openai-agents 0.24.0",
    install=pip("openai-agents==0.24.0"),
    ways=ways("openai_agents", COLUMNS[:4], environment={"OPENAI_AGENTS_DISABLE_TRACING": "1"}),
    says=hands_over,
    prints=PRINTS,
    features="handoff, output type",
    absent=dict.fromkeys(COLUMNS[4:], "through litellm only"),
)
_PYDANTIC: dict[str, Any] = {"version": "pydantic-ai-slim 2.68.0", "install": pip("pydantic-ai-slim[openai,anthropic]==2.68.0")}
PYDANTIC_AI = Program(
    name="pydantic-ai",
    **_PYDANTIC,
    ways=ways("pydantic_ai", COLUMNS),
    says=works(answer=call("final_result", **ANSWER)),
    prints=PRINTS,
    features="output type as a tool",
)
PYDANTIC_AI_NATIVE = Program(
    name="pydantic-ai-native",
    **_PYDANTIC,
    environment_of="pydantic-ai",
    ways=ways("pydantic_ai", COLUMNS, "native"),
    says=works(),
    models=("policy", "claude-sonnet-4-5"),
    prints=PRINTS,
    features="`NativeOutput`",
)
_LANGGRAPH: dict[str, Any] = {
    "version": "langgraph 1.2.24",
    "install": pip("langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10"),
    "prints": PRINTS,
}
LANGGRAPH = Program(
    name="langgraph",
    **_LANGGRAPH,
    ways=ways("langgraph", COLUMNS),
    says=works(answer=call("Repair", **ANSWER)),
    features="`ToolStrategy`",
)
LANGGRAPH_NATIVE = Program(
    name="langgraph-native",
    **_LANGGRAPH,
    environment_of="langgraph",
    ways=ways("langgraph", COLUMNS, "native"),
    says=works(),
    features="`ProviderStrategy`",
)
LLAMA_INDEX = Program(
    name="llama-index",
    version="llama-index-core 0.14.25",
    install=pip(
        *("llama-index-core==0.14.25", "llama-index-llms-openai==0.8.3", "llama-index-llms-openai-like==0.8.1"),
        *("llama-index-llms-anthropic==0.12.3", "anthropic==0.125.0"),  # it fails with later releases of the SDK
    ),
    ways=ways("llama_index", COLUMNS),
    says=answers_twice,
    models=("policy", "claude-sonnet-4-5"),
    prints=PRINTS,
    features="output class",
)
AG2 = Program(
    name="ag2",
    version="ag2 1.2.1",
    install=pip("ag2[openai,anthropic]==1.2.1"),
    ways=ways("ag2", COLUMNS),
    says=works(),
    prints=PRINTS,
    features="response schema",
)
CREWAI = Program(
    name="crewai",
    version="crewai 1.15.30",
    install=pip("crewai[anthropic]==1.15.30"),
    ways=ways("crewai", (*COLUMNS[:3], *COLUMNS[4:]), environment={"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}),
    says=works(),
    prints=PRINTS,
    features="pydantic output",
    absent={"responses-streamed": "it ignores the calls of a streamed response (`_handle_streaming_responses`)"},
)


def turns(prompt: str) -> int:
    """The number of the policy's turns in a prompt. smolagents shows results as user messages."""
    return prompt.count("<|im_start|>assistant") - 1


def calls_tools(prompt: str, results: int) -> str:
    return works(answer=call("final_answer", answer=json.dumps(ANSWER)))(prompt, turns(prompt))


def writes_code(prompt: str, results: int) -> str:
    """The policy of smolagents' code agent: its turns are Python between tags."""
    code = [f"print(shell(command={command!r}))" for command in (LOOK, MEND)]
    code.append(f"final_answer({ANSWER!r})")
    return f"Thought: the next step.\n<code>\n{code[min(turns(prompt), 2)]}\n</code>"


_CHAT_ONLY = dict.fromkeys(COLUMNS[2:], "it has chat completions only")
_SMOLAGENTS: dict[str, Any] = {
    "version": "smolagents 1.26.0",
    "install": pip("smolagents[openai]==1.26.0"),
    "prints": PRINTS,
    "absent": _CHAT_ONLY,
}
SMOLAGENTS = Program(name="smolagents", **_SMOLAGENTS, ways=ways("smolagents", COLUMNS[:2]), says=writes_code, features="`CodeAgent`")
SMOLAGENTS_TOOLS = Program(
    name="smolagents-tools",
    **_SMOLAGENTS,
    environment_of="smolagents",
    ways=ways("smolagents", COLUMNS[:2], "tools"),
    says=calls_tools,
    features="`ToolCallingAgent`",
)


def calls_in_text(prompt: str, results: int) -> str:
    return works()(prompt, turns(prompt))


_QWEN_AGENT: dict[str, Any] = {
    "version": "qwen-agent 0.0.34",
    "install": pip("qwen-agent==0.0.34", *("numpy==2.4.6", "soundfile==0.14.0", "tqdm==4.70.1", "python-dateutil==4.0.0")),
    "prints": PRINTS,
    "absent": _CHAT_ONLY | {"chat": "it always streams"},
    "says": calls_in_text,
}
QWEN_AGENT = Program(name="qwen-agent", **_QWEN_AGENT, ways=ways("qwen_agent", COLUMNS[1:2]), features="calls as text")
LITELLM = Program(
    name="litellm",
    version="litellm 1.110.2",
    install=pip("litellm[mcp]==1.110.2"),
    ways=ways("litellm", COLUMNS, environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"}),
    says=works(),
    prints=PRINTS,
    features="response format",
)
PROGRAMS = (
    *(OPENAI_AGENTS, PYDANTIC_AI, PYDANTIC_AI_NATIVE, LANGGRAPH, LANGGRAPH_NATIVE, LLAMA_INDEX, AG2, CREWAI),
    *(SMOLAGENTS, SMOLAGENTS_TOOLS, QWEN_AGENT, LITELLM),
)
