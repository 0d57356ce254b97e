"""Runs a user-supplied agent program unchanged in the episode's sandbox, and trains the policy on the answers that the policy sampled for
the program.

rollout=RolloutConfig(
    agent=Part(
        "agentrl.gateway:ExternalProgram",
        options={"command": ["python3", "agent.py"], "files": {"agent.py": "agents/mine.py"}},
    )
)
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from asyncio import AbstractEventLoop
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from weakref import WeakKeyDictionary

from agentrl.errors import InfrastructureError, TaskError, UserError
from agentrl.gateway.rewards import POSTED_REWARDS
from agentrl.gateway.server import HOST, Gateway, import_server
from agentrl.gateway.session import Session
from agentrl.gateway.tokens import Chat, ConversationTokens
from agentrl.protocols import LiveEpisode, Sandbox
from agentrl.records import Blame, ExecResult, Failure, destinations
from agentrl.records.paths import is_plain_path

PORT = 8790
MODEL = "policy"
ANSWERS = ("stdout", "message", "none")
OUTPUT_BYTES = 1 << 16
GRACE_S = 5.0
"""Seconds for which a program may continue after its session has reached a limit."""
MAX_FILE = 8 << 20
_OUTPUT_CHARS = 1500  # maximum characters from a program's output in a failure
_MAX_NAME_BYTES = 255  # of a file, the kernel's limit
_NOT_BYTES = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # the other surrogates represent bytes, as in `os.fsdecode`

_gateways: WeakKeyDictionary[AbstractEventLoop, dict[tuple[str, int], Gateway]] = WeakKeyDictionary()


class ExternalProgram:
    """An `agentrl.protocols.Agent` that runs a program in the sandbox, with the gateway as its model. One object serves all episodes.

    The program receives the task's prompt on standard input, and these environment variables: `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
    `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `AGENTRL_MODEL` (the name of the model), `AGENTRL_SESSION` (the episode's id). The program
    uses its own tools, not the task's tools. The episode ends when the program exits or is stopped. The stop reason, or the fault, depends
    on when and how this happens:

    - with status 0: `answered`;
    - with a different status or by a signal, after the policy's first answer: `failed`, and the episode is scored, because the policy's
      answers caused the failure;
    - before the policy's first answer: an `InfrastructureError` if the program disconnected from a request, otherwise a `TaskError`,
      because nothing was sampled and a retry would not help;
    - up to `GRACE_S` seconds after the session has reached the task's `turns`: `turn_limit`;
    - up to `GRACE_S` seconds after the session has rejected more than a thousand requests: `refused`;
    - at the task's `wall_s`: `wall_limit`, which is blamed on the policy if the program itself used at least half of that time.
    """

    boundaries = False  # the program's state cannot be captured
    task_tools = False  # the program has its own tools

    def __init__(
        self,
        *,
        chat: Chat,
        command: Sequence[str],
        files: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        answer: str = "stdout",
        models: Sequence[str] = (MODEL,),
        host: str = HOST,
        port: int = PORT,
        reward_key_file: str = "",
    ) -> None:
        """Sets the options. In a recipe, all options except `chat` come from `rollout.agent.options`.

        Args:
            command: the program and its arguments. `{prompt}`, `{model}` and `{base_url}` in an argument are replaced.
            files: path in the sandbox's working directory -> path of a project file, which is copied there before the program starts.
            environment: additional environment variables for the program. `{model}`, `{base_url}` and `{key}` in a value are replaced.
            answer: source of the episode's answer: "stdout" is the program's output; "message" is the policy's last text in the main
                conversation; "none" is for tasks whose score depends only on files.
            models: names that the program may request. All names refer to the policy. The program receives the first name in
                `AGENTRL_MODEL`.
            host, port: where the gateway listens on this machine. The task's `sandbox.network` must contain this address.
            reward_key_file: file for the key with which a process on the host posts rewards (`agentrl.gateway.rewards`).

        Raises:
            UserError: an option is invalid, a file cannot be read or written, or the extra `gateway` is not installed.
        """
        self._tokens = ConversationTokens(chat)
        self._command = _texts(command, "command")
        self._environment = {_checked_variable(name): value for name, value in _mapping(environment, "environment").items()}
        self._answer = answer
        self._models = _texts(models, "models")
        self._host, self._port = host, port
        if answer not in ANSWERS:
            raise UserError(f"rollout.agent.options.answer={answer!r} is not supported", fix=f"use one of {', '.join(ANSWERS)}")
        try:
            destinations.parse_destination(self.address)
        except ValueError as error:
            raise UserError(
                f"rollout.agent.options: host and port are invalid: {error}", fix="use a literal address, such as 127.0.0.1"
            ) from None
        import_server()
        self._rewarded = bool(reward_key_file)
        if reward_key_file:
            POSTED_REWARDS.make_key(reward_key_file)
        self._files = {_checked_path(name): _read(path) for name, path in _mapping(files, "files").items()}

    @property
    def address(self) -> str:
        """The gateway's address in the format of `SandboxSpec.network`."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    async def act(self, episode: LiveEpisode) -> str:
        """Runs the program, and returns why the episode ended. Raises the faults that the class describes, the fault of the session, and
        `TaskError` if the sandbox cannot reach the gateway, the episode starts after turn 0, or the task limits tool calls or thinking."""
        if episode.task.sandbox is None or self.address not in episode.task.sandbox.network:
            fix = f'add "{self.address}" to sandbox.network'
            raise TaskError(f"task {episode.task.id!r}: its sandbox cannot reach the gateway", fix=fix)
        if episode.turn_count:
            raise TaskError(
                f"task {episode.task.id!r} starts after turn {episode.turn_count}, but an external program can only start at the beginning",
                fix="use cases that start at turn 0",
            )
        limits = episode.task.limits
        if limits.tool_calls is not None or limits.thinking_tokens is not None:
            raise TaskError(
                f"task {episode.task.id!r}: limits.tool_calls and limits.thinking_tokens do not apply to external programs",
                fix="remove them; limits.turns and limits.all_tokens apply to every agent",
            )
        sandbox = await episode.sandbox()
        for name, content in self._files.items():
            await sandbox.write(name, content)
        session = Session(episode=episode, tokens=self._tokens, models=self._models)
        with POSTED_REWARDS.open(episode.id) if self._rewarded else contextlib.nullcontext():
            async with self._gateway().session(session) as key:
                episode.stage = "agent"
                result = await self._run(episode, session, sandbox, key)
                episode.stage = "agent"
                if self._rewarded and session.fault is None:
                    await POSTED_REWARDS.wait(episode.id)
        return self._ended(episode, session, result)

    def _gateway(self) -> Gateway:
        """Returns the gateway at this address, which all agents of the event loop share."""
        here = _gateways.setdefault(asyncio.get_running_loop(), {})
        return here.setdefault((self._host, self._port), Gateway(host=self._host, port=self._port))

    async def _run(self, episode: LiveEpisode, session: Session, sandbox: Sandbox, key: str) -> ExecResult | None:
        """Runs the program. Returns None if the program was stopped because its session was over."""
        url = f"http://{self.address}"
        values = {"{model}": self._models[0], "{base_url}": f"{url}/v1", "{key}": key}
        prompt = "\n\n".join(message.content for message in episode.task.prompt)
        environment = {
            **{"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key},
            **{"AGENTRL_MODEL": self._models[0], "AGENTRL_SESSION": episode.id},
            **{name: _filled(value, values) for name, value in self._environment.items()},
        }
        # Other processes can read arguments, so they do not contain the key.
        argv = [_filled(part, {**values, "{key}": "{key}", "{prompt}": prompt}) for part in self._command]
        with _OwnTime(episode, sandbox) as own:
            session.on_busy = own.busy
            run = sandbox.exec(
                argv, stdin=prompt.encode(), timeout_s=episode.task.limits.wall_s, output_bytes=OUTPUT_BYTES, env=environment
            )
            program, over = asyncio.create_task(run), asyncio.create_task(session.over.wait())
            try:
                await asyncio.wait({program, over}, return_when=asyncio.FIRST_COMPLETED)
                if not program.done() and session.fault is None:
                    await asyncio.wait({program}, timeout=GRACE_S)
                if program.done():
                    return program.result()
                episode.sandbox_lost = True
                return None
            finally:
                session.on_busy = lambda busy: None
                await _cancel(program, over)

    def _ended(self, episode: LiveEpisode, session: Session, result: ExecResult | None) -> str:
        """Returns the stop reason. Raises the fault of the session, or of a program that failed before the policy's first answer. Records a
        later failure of the program."""
        if session.fault is not None:
            raise session.fault
        answered = session.counts["answered"]
        if result is None or session.limit:
            self._hand_in(episode, session, result)
            return session.limit
        if result.ok and answered:
            self._hand_in(episode, session, result)
            return "answered"
        status = f"ended with status {result.exit_code}" if result.exit_code is not None else f"was killed ({result.reason})"
        output = result.stderr.strip()[-_OUTPUT_CHARS:] or result.stdout.strip()[-_OUTPUT_CHARS:]
        if not answered:
            if session.counts["client_gone"]:
                raise InfrastructureError("the program disconnected before the policy's first answer")
            raise TaskError(f"the program {self._command[0]!r} {status} before the policy's first answer: {output}")
        message = f"the program {status}: {output}"
        episode.add_failure(Failure(stage="agent", blame=Blame.POLICY, kind="program_failed", message=message, turn=episode.turn_count))
        return "failed"

    def _hand_in(self, episode: LiveEpisode, session: Session, result: ExecResult | None) -> None:
        if self._answer == "message":
            episode.answer = session.last_words()
        elif self._answer == "stdout" and result is not None and result.ok:
            episode.answer = result.stdout.strip()


class _OwnTime:
    """Counts the time during which the program is not waiting for a completion."""

    def __init__(self, episode: LiveEpisode, sandbox: Sandbox) -> None:
        self._episode, self._sandbox = episode, sandbox
        self._running = ExitStack()

    def __enter__(self) -> _OwnTime:
        self.busy(False)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def busy(self, busy: bool) -> None:
        """Stops counting if `busy` is true (a completion is being sampled); otherwise starts counting."""
        stage = self._episode.stage
        self._running.close()
        if not busy:
            self._running.enter_context(self._episode.running(self._sandbox))
        self._episode.stage = stage


async def _cancel(*tasks: asyncio.Task[object] | asyncio.Task[ExecResult]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Replaces placeholders in one pass."""
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match[0]], text)


def _texts(values: Sequence[str], name: str) -> tuple[str, ...]:
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or not values or not all(isinstance(value, str) and value for value in values):
        raise UserError(f"rollout.agent.options.{name} must be a list of non-empty strings", fix=f'write {name}=["python3", "agent.py"]')
    _check_characters(values, name)
    return tuple(values)


def _mapping(values: Mapping[str, str] | None, name: str) -> Mapping[str, str]:
    mapping = values or {}
    if not isinstance(mapping, Mapping) or not all(isinstance(part, str) for pair in mapping.items() for part in pair):
        raise UserError(f"rollout.agent.options.{name} must map strings to strings", fix=f'write {name}={{"agent.py": "agents/mine.py"}}')
    _check_characters([part for pair in mapping.items() for part in pair], name)
    return mapping


def _check_characters(values: Sequence[str], name: str) -> None:
    """Raises `UserError` if a value cannot be passed to a program."""
    for value in values:
        if _NOT_BYTES.search(value):
            fix = "remove NUL characters and surrogates"
            raise UserError(f"rollout.agent.options.{name}: {value!r} contains a character that no program can receive", fix=fix)


def _checked_variable(name: str) -> str:
    if not name or "=" in name:
        raise UserError(f"rollout.agent.options.environment: {name!r} is not the name of a variable", fix="use a name without `=`")
    return name


def _checked_path(path: str) -> str:
    if not is_plain_path(path) or any(len(name.encode()) > _MAX_NAME_BYTES for name in path.split("/")):
        raise UserError(
            f"rollout.agent.options.files: {path!r} is not a plain path relative to the working directory",
            fix="use a short relative path such as agents/mine.py; no part between slashes may be empty, `.` or `..`",
        )
    return path


def _read(path: str) -> bytes:
    try:
        if Path(path).stat().st_size > MAX_FILE:
            raise UserError(f"rollout.agent.options.files: {path} has more than {MAX_FILE >> 20} MiB", fix="put the file into the image")
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"rollout.agent.options.files: {path}: {error.strerror or error}", fix="use a file of the project") from None
