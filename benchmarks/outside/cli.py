"""Programs with a command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from benchmarks.outside.program import LOOK, MEND, PROMPT, PROTOCOLS, Program, Says, Way, call, npm, pip

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def mini_says(prompt: str, results: int) -> str:
    texts = ("I look at the code first.", "The sum should be a product.", "The test passes.")
    commands = (LOOK, MEND, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    return texts[min(results, 2)] + call("bash", command=commands[min(results, 2)])


def codex_says(prompt: str, results: int) -> str:
    if results >= 2:
        return "area.py multiplies now, and the test passes."
    command = (LOOK, MEND)[results]
    if '"exec_command"' in prompt:
        return call("exec_command", cmd=command)
    return call("shell", command=["bash", "-c", command]) if '"shell"' in prompt else call("shell_command", command=command)


def codex_leads(prompt: str, results: int) -> str:
    """The main agent starts a sub-agent and waits for it. The sub-agent repairs the file."""
    if PROMPT not in prompt:
        return codex_says(prompt, results)
    if results == 0:
        return call("multi_agent_v1__spawn_agent", message="Look at area.py, mend it, and run python3 test_area.py until it passes.")
    started = re.findall(_UUID, prompt.rpartition("<tool_response>")[2])
    if results == 1 and started:
        return call("multi_agent_v1__wait_agent", targets=started[:1], timeout_ms=120_000)
    return "The other agent has mended area.py, and the test passes."


def gptme_says(prompt: str, results: int) -> str:
    if '"shell"' not in prompt:
        return "Mending area.py"  # a title or a summary is requested
    texts = ("I look at the code first.", "The sum should be a product.", "The test passes.")
    commands = (call("shell", command=LOOK), call("shell", command=MEND), call("complete"))
    return texts[min(results, 2)] + commands[min(results, 2)]


def shell_says(tool: str) -> Says:
    """For a program whose shell tool has this name: two commands, then an answer. Requests without the tool are for a title."""

    def says(prompt: str, results: int) -> str:
        if f'"{tool}"' not in prompt:
            return "Mending area.py"
        if results >= 2:
            return "area.py multiplies now, and the test passes."
        text, command = (("I look at the code first.", LOOK), ("The sum should be a product.", MEND))[results]
        return text + call(tool, command=command, description="Runs a command")

    return says


def claude_leads(prompt: str, results: int) -> str:
    """The main agent starts a sub-agent, which repairs the file."""
    if f"{PROMPT}\n" not in prompt and f"{PROMPT}<" not in prompt:
        return _CLAUDE_SAYS(prompt, results)
    if results == 0:
        task = "Look at area.py, mend it, and run python3 test_area.py until it passes."
        return call("Agent", description="Mend area.py", prompt=task, subagent_type="general-purpose", run_in_background=False)
    return "The other agent has mended area.py, and the test passes."


def claude_searches(prompt: str, results: int) -> str:
    """The program hides most of its tools until they are searched for."""
    if results == 0:
        return call("ToolSearch", query="select:WebFetch,TaskStop", max_results=5)
    return _CLAUDE_SAYS(prompt, results - 1)


def aider_says(prompt: str, results: int) -> str:
    """The first edit is wrong, so that the program shows what the test prints."""
    wrong = "    return abs(width - height)\n"  # of another size: Python's cache of compiled code compares seconds and sizes
    was, new = (wrong, "    return width * height\n") if "AssertionError" in prompt else ("    return width + height\n", wrong)
    return f"The sum is wrong.\n\narea.py\n```python\n<<<<<<< SEARCH\n{was}=======\n{new}>>>>>>> REPLACE\n```\n"


_BINARY = "/opt/node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
_CODEX_ONLY = dict.fromkeys(("chat", "chat-streamed"), "it has Responses only") | {"responses": "it always streams"}
CODEX = Program(
    name="codex",
    version="@openai/codex 0.169.0",
    install=npm("@openai/codex@0.169.0"),
    ways=(
        Way(
            protocol="responses",
            stream=True,
            command=(
                *(_BINARY, "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "-m", "{model}"),
                *("-c", "model_provider=gateway", "-c", "model_providers.gateway.name=gateway"),
                *("-c", "model_providers.gateway.base_url={base_url}", "-c", "model_providers.gateway.env_key=OPENAI_API_KEY"),
                *("-c", "model_providers.gateway.wire_api=responses", "-c", "web_search=disabled", "-"),
            ),
        ),
    ),
    says=codex_says,
    absent=_CODEX_ONLY,
)
_MINI_ENVIRONMENT = {
    "PYTHONPATH": "/opt/lib",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
_MINI_MODELS = {
    "chat": ("-m", "openai/{model}"),
    "responses": ("-m", "openai/{model}", "--model-class", "litellm_response"),
    "messages": ("-m", "anthropic/{model}"),
}


def _mini(protocol: str) -> Way:
    return Way(
        protocol=protocol,
        stream=False,
        command=(
            *("python3", "-m", "minisweagent", *_MINI_MODELS[protocol], "-y", "--exit-immediately"),
            *("-o", "/tmp/run.json", "-t", "{prompt}"),
        ),
        environment=_MINI_ENVIRONMENT,
    )


MINI = Program(
    name="mini-swe-agent",
    version="mini-swe-agent 2.4.6",
    install=pip("mini-swe-agent==2.4.6", "litellm[mcp]==1.106.2"),  # litellm imports mcp at its first answer
    ways=tuple(map(_mini, _MINI_MODELS)),
    says=mini_says,
    absent=dict.fromkeys((f"{one}-streamed" for one in _MINI_MODELS), "it does not stream"),
)


def _gptme(protocol: str, stream: bool) -> Way:
    model = "anthropic/{model}" if protocol == "messages" else "openai/{model}"
    streams = "--stream" if stream else "--no-stream"
    return Way(
        protocol=protocol,
        stream=stream,
        command=("python3", "-m", "gptme", "-n", "--model", model, streams, "--tool-format", "tool", "--no-workspace", "{prompt}"),
        environment={
            "PYTHONPATH": "/opt/lib",
            "XDG_DATA_HOME": "/tmp/data",
            "XDG_CONFIG_HOME": "/tmp/config",
            "GPTME_CHECK": "false",
            "GPTME_OPENAI_RESPONSES_API": "0" if protocol == "chat" else "1",
        },
    )


GPTME = Program(
    name="gptme",
    version="gptme 0.35.1",
    install=pip("gptme==0.35.1"),
    ways=tuple(_gptme(protocol, stream) for protocol in PROTOCOLS for stream in (False, True)),
    models=("policy", "claude-haiku-4-5", "gpt-5-mini"),  # the latter two for titles
    says=gptme_says,
)
SUB_AGENTS = replace(
    CODEX, name="codex-sub-agents", version=f"{CODEX.version}, with a sub-agent", environment_of="codex", says=codex_leads, absent={}
)
_CLAUDE_SAYS = shell_says("Bash")
CLAUDE = Program(
    name="claude-code",
    version="@anthropic-ai/claude-code 2.1.332",
    install=npm("@anthropic-ai/claude-code@2.1.332"),
    ways=(
        Way(
            protocol="messages",
            stream=True,
            command=(
                "/opt/node_modules/@anthropic-ai/claude-code-linux-x64/claude",
                *("-p", "--model", "{model}", "--dangerously-skip-permissions"),
            ),
            environment={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"},
        ),
    ),
    says=_CLAUDE_SAYS,
    absent={
        **dict.fromkeys(("chat", "chat-streamed", "responses", "responses-streamed"), "it has Messages only"),
        "messages": "it always streams",
    },
)
CLAUDE_SUB_AGENTS = replace(
    CLAUDE,
    name="claude-code-sub-agents",
    version=f"{CLAUDE.version}, with a sub-agent",
    environment_of="claude-code",
    says=claude_leads,
    absent={},
)
CLAUDE_SEARCH = replace(
    CLAUDE_SUB_AGENTS, name="claude-code-tool-search", version=f"{CLAUDE.version}, with a search for tools", says=claude_searches
)
_AI_SDKS = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "messages": "@ai-sdk/anthropic"}


def _opencode(protocol: str) -> Way:
    options = {"baseURL": "{base_url}", "apiKey": "{key}"}
    provider = {"npm": _AI_SDKS[protocol], "options": options, "models": {"policy": {}}}
    config = {"provider": {"gateway": provider}, "share": "disabled"}
    return Way(
        protocol=protocol,
        stream=True,
        command=("/opt/node_modules/opencode-linux-x64/bin/opencode", "run", "--auto", "-m", "gateway/{model}"),
        environment={
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "true",
            "OPENCODE_DISABLE_MODELS_FETCH": "true",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "true",
        },
    )


OPENCODE = Program(
    name="opencode",
    version="opencode-ai 1.18.33",
    install=npm("opencode-ai@1.18.33"),
    ways=tuple(map(_opencode, _AI_SDKS)),
    says=shell_says("bash"),
    absent=dict.fromkeys(_AI_SDKS, "it always streams"),
)
_AIDER_MODELS = {"chat": "openai/{model}", "responses": "openai/responses/{model}", "messages": "anthropic/{model}"}


def _aider(protocol: str, stream: bool) -> Way:
    offline = ("--no-check-update", "--no-analytics", "--no-show-release-notes", "--no-show-model-warnings")
    return Way(
        protocol=protocol,
        stream=stream,
        command=(
            *("python3", "-m", "aider", "--model", _AIDER_MODELS[protocol], "--stream" if stream else "--no-stream", *offline),
            *("--yes-always", "--no-git", "--edit-format", "diff", "--auto-test", "--test-cmd", "python3 test_area.py"),
            *("--message", "{prompt}", "area.py"),
        ),
        environment={"PYTHONPATH": "/opt/lib", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )


AIDER = Program(
    name="aider",
    version="aider-chat 0.86.2",
    install=pip("aider-chat==0.86.2"),
    ways=tuple(_aider(one, stream) for one in _AIDER_MODELS for stream in (False, True) if not (stream and one == "responses")),
    says=aider_says,
    absent={"responses-streamed": "its litellm requests whole answers there and splits them itself"},
)
PROGRAMS = (CLAUDE, CLAUDE_SUB_AGENTS, CLAUDE_SEARCH, CODEX, SUB_AGENTS, OPENCODE, AIDER, MINI, GPTME)
