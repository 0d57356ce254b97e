"""Agent programs that nobody here wrote, unchanged, each on a small repair task through the gateway, in a bubblewrap sandbox.

    python benchmarks/outside_programs.py mini-swe-agent
    python benchmarks/outside_programs.py codex --work /tmp/programs
    python benchmarks/outside_programs.py gptme --json --requests requests.jsonl

Each makes its own environment under `--work`, at an exact version from the package index (pip) or npm, which the sandbox shows read-only
at `/opt`. The policy is a script that says what a competent model would: it looks at the files, mends the broken one, runs the test and
ends. What is measured is whether the program gets along with the gateway: which requests it makes, what they become in the
episode's tree, and the share of sampled tokens that reach the learner after the very ids that the policy was shown. Exit status 1 where
the test of the task does not pass in the sandbox, or that share is not 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.agent import ChatFormat
from agentrl.gateway import Gateway, Outside
from agentrl.gateway.session import Session
from agentrl.objective import counted_samples
from agentrl.protocols import LiveEpisode, Sandbox
from agentrl.records import Episode, ExecResult, Group, Limits, Message, SandboxSpec, Score, ScoredEpisode, Split, Task
from agentrl.rollout import EpisodeRunner
from agentrl.sampling import Sampling
from agentrl.sandbox import BubblewrapBackend
from agentrl.testing import ReplayPolicy, byte_tokenizer

ROOT = Path(__file__).resolve().parents[1]
BROKEN = "def area(width, height):\n    return width + height\n"
TEST = "from area import area\n\nassert area(3, 4) == 12, area(3, 4)\nprint('passed')\n"
PROMPT = "test_area.py fails. Mend area.py, so that `python3 test_area.py` prints passed. Do not change the test."
LOOK, MEND = "cat area.py test_area.py", "sed -i 's/width + height/width * height/' area.py && python3 test_area.py"
TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"  # before the rest, as templates show them
MAX_MODEL_LEN = 400_000  # of bytes: the script's tokenizer has a token for each


# ------------------------------------------------------------------------------------------------ programs


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program: how it is installed, how it is run, and what a competent model says to it."""

    install: Callable[[Path], list[str]]  # the command that puts it into a folder
    version: str
    of: str = ""  # the program whose environment it shares
    command: tuple[str, ...]
    says: Callable[[str, int], str]  # the prompt, and how many results of tools it holds -> the completion
    environment: Mapping[str, str] = field(default_factory=dict)
    models: tuple[str, ...] = ("policy",)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def pip(*packages: str) -> Callable[[Path], list[str]]:
    def command(folder: Path) -> list[str]:
        return [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(folder / "lib"), *packages]

    return command


def npm(package: str) -> Callable[[Path], list[str]]:
    def command(folder: Path) -> list[str]:
        return ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]

    return command


def mini_says(prompt: str, results: int) -> str:
    said = ("I look at the code first.", "The sum should be a product.", "The test passes.")
    commands = (LOOK, MEND, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    return said[min(results, 2)] + call("bash", command=commands[min(results, 2)])


def codex_says(prompt: str, results: int) -> str:
    if results >= 2:
        return "area.py multiplies now, and the test passes."
    command = (LOOK, MEND)[results]
    if '"exec_command"' in prompt:
        return call("exec_command", cmd=command)
    return call("shell", command=["bash", "-c", command]) if '"shell"' in prompt else call("shell_command", command=command)


def codex_leads(prompt: str, results: int) -> str:
    """The main agent starts another one, and waits for it; that one mends the file."""
    if PROMPT not in prompt:
        return codex_says(prompt, results)
    if results == 0:
        return call("multi_agent_v1__spawn_agent", message="Look at area.py, mend it, and run python3 test_area.py until it passes.")
    begun = re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", prompt.rpartition("<tool_response>")[2])
    if results == 1 and begun:
        return call("multi_agent_v1__wait_agent", targets=begun[:1], timeout_ms=120_000)
    return "The other agent has mended area.py, and the test passes."


def gptme_says(prompt: str, results: int) -> str:
    if '"shell"' not in prompt:
        return "Mending area.py"  # asked for a title, or for a summary
    said = ("I look at the code first.", "The sum should be a product.", "The test passes.")
    commands = (call("shell", command=LOOK), call("shell", command=MEND), call("complete"))
    return said[min(results, 2)] + commands[min(results, 2)]


_BINARY = "/opt/node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
CODEX = Program(
    install=npm("@openai/codex@0.169.0"),
    version="@openai/codex 0.169.0 (Responses, streamed)",
    command=(
        *(_BINARY, "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "-m", "{model}"),
        *("-c", "model_provider=gateway", "-c", "model_providers.gateway.name=gateway"),
        *("-c", "model_providers.gateway.base_url={base_url}", "-c", "model_providers.gateway.env_key=OPENAI_API_KEY"),
        *("-c", "model_providers.gateway.wire_api=responses", "-c", "web_search=disabled", "-"),
    ),
    says=codex_says,
)
PROGRAMS = {
    "mini-swe-agent": Program(
        install=pip("mini-swe-agent==2.4.6", "litellm[mcp]==1.106.2"),  # which imports mcp whether it is asked for or not
        version="mini-swe-agent 2.4.6 (chat completions, by litellm)",
        command=(
            *("python3", "-m", "minisweagent", "-m", "openai/{model}", "-y", "--exit-immediately"),
            *("-o", "/tmp/run.json", "-t", "{prompt}"),
        ),
        environment={
            "PYTHONPATH": "/opt/lib",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        says=mini_says,
    ),
    "codex": CODEX,
    "codex-sub-agents": replace(CODEX, of="codex", version=f"{CODEX.version}, with a sub-agent", says=codex_leads),
    "gptme": Program(
        install=pip("gptme==0.35.1"),
        version="gptme 0.35.1 (Anthropic messages, by Anthropic's SDK)",
        command=("python3", "-m", "gptme", "-n", "--model", "anthropic/{model}", "--tool-format", "tool", "--no-workspace", "{prompt}"),
        environment={"PYTHONPATH": "/opt/lib", "XDG_DATA_HOME": "/tmp/data", "XDG_CONFIG_HOME": "/tmp/config", "GPTME_CHECK": "false"},
        models=("policy", "claude-haiku-4-5"),
        says=gptme_says,
    ),
}


def installed(name: str, work: Path) -> Path:
    """The folder of a program's environment, made the first time."""
    folder = work / (PROGRAMS[name].of or name)
    if not (folder / "whole").exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"installing {PROGRAMS[name].version} into {folder}", file=sys.stderr)
        subprocess.run(PROGRAMS[name].install(folder), check=True, stdout=sys.stderr)
        (folder / "whole").touch()
    return folder


# ------------------------------------------------------------------------------------------------ sandbox, gateway, policy


class WithProgram(BubblewrapBackend):
    """Bubblewrap sandboxes that show one folder of this machine, read-only, at `/opt`, as an image with the program in it would."""

    def __init__(self, folder: Path) -> None:
        super().__init__(run_label="outside-programs", root=ROOT)
        self._folder = folder

    def _view(self, *given: Any, **named: Any) -> list[str]:
        return [*super()._view(*given, **named), "--ro-bind", str(self._folder), "/opt"]


@dataclass(slots=True, eq=False)
class Recording(Gateway):
    """A gateway that keeps what it is sent: method, path, body and the status of the answer."""

    seen: list[tuple[str, str, bytes, int]] = field(default_factory=list)

    def _app(self) -> Any:
        inner = Gateway._app(self)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            body, status = bytearray(), [0]

            async def received() -> Any:
                message = await receive()
                body.extend(message.get("body", b""))
                return message

            async def sent(message: Any) -> None:
                status[0] = message.get("status", status[0])
                await send(message)

            await inner(scope, received, sent)
            if scope["type"] == "http":
                self.seen.append((scope["method"], scope["path"], bytes(body), status[0]))

        return app


class Watched(Outside):
    """`Outside` with a recording gateway, which keeps what the program ended with and runs the task's test where it ran."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.recording = Recording(host=self._host, port=self._port)
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


@dataclass(slots=True)
class Competent:
    """The script as a policy's: it reads the prompt, and counts the results of tools in it."""

    tokenizer: Any
    says: Callable[[str, int], str]
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, prompt: Sequence[int]) -> Sequence[int]:
        self.prompts.append(tuple(prompt))
        text = self.tokenizer.decode(prompt)
        said = self.says(text, len(re.findall(r"<\|im_start\|>user\n<tool_response>", text)))
        return (*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id)


def exact_share(episode: Episode, prompts: Sequence[tuple[int, ...]]) -> float:
    """Of the sampled tokens, those that the samples train once, after exactly what the policy was shown."""
    group = Group(index=0, task_id="t", task_key="k", episodes=(ScoredEpisode(episode=episode, score=Score(value=1.0)),))
    left, trained = Counter(prompts), 0
    for sample in counted_samples([group]):
        mask = (*sample.loss_mask, False)
        begins = [at for at in range(1, len(sample.token_ids)) if mask[at] and not mask[at - 1]]
        for begin in begins:
            if left[tuple(sample.token_ids[:begin])] > 0:
                left[tuple(sample.token_ids[:begin])] -= 1
                trained += next(at for at in range(begin, len(mask)) if not mask[at]) - begin
    return trained / max(1, episode.completion_tokens)


# ------------------------------------------------------------------------------------------------ one run


async def run(name: str, work: Path, *, port: int, wall_s: float) -> dict[str, Any]:
    program = PROGRAMS[name]
    folder = await asyncio.to_thread(installed, name, work)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLS + tokenizer.chat_template
    agent = Watched(
        chat=ChatFormat(tokenizer),
        command=program.command,
        environment=program.environment,
        models=program.models,
        answer="none",
        port=port,
    )
    policy, backend = Competent(tokenizer, program.says), WithProgram(folder.resolve())
    spec = SandboxSpec(
        image="sandboxes/tables", memory_mb=2048, processes=256, cpus=2.0, disk_mb=512, open_files=1024, network=(agent.address,)
    )
    task = Task(
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
    runner = EpisodeRunner(
        agent=agent,
        policy=ReplayPolicy(policy),
        sandboxes=backend,
        sampling=Sampling(),
        max_model_len=MAX_MODEL_LEN,
        request_timeout_s=60.0,
    )
    try:
        await backend.prepare(spec)
        episode = await runner.run(task, episode_id=name)
    finally:
        await backend.close()
    ended, tested, session = agent.ended, agent.tested, agent.session
    return {
        "program": program.version,
        "test_passed": tested is not None and tested.ok,
        "exact_share": exact_share(episode, policy.prompts),
        "sampled_tokens": episode.completion_tokens,
        "requests": [summed_up(*one) for one in agent.recording.seen],
        "trajectories": [[line.agent, len(line.turns), line.parent is not None] for line in episode.trajectories],
        "counts": {} if session is None else {key: count for key, count in session.counts.items() if count},
        "stop": episode.trajectories[0].stop_reason,
        "failures": [f"{one.blame}: {one.kind}: {one.message}" for one in episode.failures],
        "exit": None if ended is None else ended.exit_code,
        "said": "" if ended is None else (ended.stdout[-1500:] + ended.stderr[-1500:]),
        "bodies": [(path, body.decode("utf-8", "replace")) for _, path, body, _ in agent.recording.seen],
    }


def summed_up(method: str, path: str, body: bytes, status: int) -> str:
    """A request in a line: where to, which fields, and how large."""
    try:
        fields = json.loads(body)
        asked = fields.get("messages", fields.get("input", ()))
        kinds = Counter(str(one.get("type")) for one in fields.get("tools") or ())
        tools = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
        what = f"{len(asked)} messages; tools: {tools}; stream: {fields.get('stream', False)}; fields: {' '.join(sorted(fields))}"
    except (ValueError, AttributeError, TypeError):
        what = f"{len(body)} bytes"
    return f"{method} {path} {status}: {what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", choices=sorted(PROGRAMS))
    parser.add_argument("--work", type=Path, default=Path("runs/outside_programs"), help="where environments are made and kept")
    parser.add_argument("--port", type=int, default=8795, help="where the gateway listens")
    parser.add_argument("--wall-s", type=float, default=180.0, help="seconds that the program has")
    parser.add_argument("--requests", type=Path, help="a file for the bodies of all requests, a JSON line each")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    given = parser.parse_args()
    if shutil.which("bwrap") is None:
        print("bubblewrap is not installed: apt-get install bubblewrap", file=sys.stderr)
        return 2
    found = asyncio.run(run(given.program, given.work, port=given.port, wall_s=given.wall_s))
    bodies, said = found.pop("bodies"), found.pop("said")
    if given.requests:
        given.requests.write_text("".join(json.dumps({"path": path, "body": body}) + "\n" for path, body in bodies), encoding="utf-8")
    met = found["test_passed"] and found["exact_share"] == 1.0
    if given.json:
        print(json.dumps({**found, "met": met}))
    else:
        for key, value in found.items():
            lines = value if isinstance(value, list) else [value]
            print(*(f"{key}: {line}" for line in lines), sep="\n")
    if not met:
        print(ascii(said).replace("\\n", "\n"), file=sys.stderr)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
