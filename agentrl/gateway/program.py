"""Outside: an agent program of anybody's, run unchanged in the episode's sandbox, and trained on what it was answered.

rollout=RolloutConfig(
    agent="agentrl.gateway:ExternalProgram",
    agent_options={"command": ["python3", "agent.py"], "files": {"agent.py": "agents/mine.py"}},
)
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from asyncio import AbstractEventLoop
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakKeyDictionary

from agentrl.base.installation import install_command
from agentrl.errors import InfrastructureError, TaskError, UserError
from agentrl.gateway.rewards import POSTED_REWARDS
from agentrl.gateway.server import HOST, Gateway
from agentrl.gateway.session import Session
from agentrl.gateway.tokens import Chat, ConversationTokens
from agentrl.protocols import LiveEpisode, Sandbox
from agentrl.records import Blame, ExecResult, Failure, destinations

PORT = 8790
MODEL = "policy"
ANSWERS = ("stdout", "message", "none")
OUTPUT_BYTES = 1 << 16
GRACE_S = 5.0
"""How long a program may go on after its session has reached a limit, or the policy cannot be asked any more."""
MAX_FILE = 8 << 20
_SHOWN = 1500  # characters of a program's last words that a failure quotes

_gateways: WeakKeyDictionary[AbstractEventLoop, dict[tuple[str, int], Gateway]] = WeakKeyDictionary()


class ExternalProgram:
    """An `agentrl.protocols.Agent`: runs a program in the sandbox, and the gateway answers it. One object for all episodes of a run.

    The program gets the task's prompt on its standard input, and where it is to ask in its environment: `OPENAI_BASE_URL`,
    `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`; `AGENTRL_MODEL`, the name of the model; `AGENTRL_SESSION`, the
    episode's id. It brings its own tools; those that a task names are not used. The episode ends when the program does:

    - with status 0: `answered`;
    - with another status, or killed, after the policy has answered it: `failed`, and scored, for what the policy said led there;
    - before the policy has answered it anything: a `TaskError`, for nothing was sampled and trying again would not help;
    - some seconds after the session has reached the task's `turns`: `turn_limit`, or has refused a thousand
      requests: `refused`;
    - at the task's `wall_s`: `wall_limit`, the policy's doing where the program itself took at least half of that.
    """

    boundaries = False  # a program's own state is nobody's to capture
    task_tools = False  # the program has its own

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
        """In a recipe these are `rollout.agent_options`, but for `chat`.

        Args:
            command: the program and its arguments. `{prompt}`, `{model}` and `{base_url}` in an argument are put in.
            files: path in the sandbox's working directory -> file of the project, written before the program starts.
            environment: further variables of the program; `{model}`, `{base_url}` and `{key}` in a value are put in.
            answer: what the program hands in: "stdout", what it has printed; "message", what the policy said last in its main
                conversation; "none", nothing, for a task that judges files.
            models: names that the program may ask for. All are the policy; the first is the one that the program is told.
            host, port: where the gateway listens, on this machine. The task's `sandbox.network` has to name it.
            reward_key_file: where the key is written with which the host's side posts rewards (`agentrl.gateway.rewards`).

        Raises:
            UserError: one of these cannot be carried out, or the extra `gateway` is not installed.
        """
        self._tokens = ConversationTokens(chat)
        self._command = _texts(command, "command")
        self._environment = {**_mapping(environment, "environment")}
        self._answer = answer
        self._models = _texts(models, "models")
        self._host, self._port = host, port
        if answer not in ANSWERS:
            raise UserError(f"rollout.agent_options: answer={answer!r}", fix=f"one of {', '.join(ANSWERS)}")
        try:
            destinations.parse_destination(self.address)
        except ValueError as error:
            raise UserError(f"rollout.agent_options: host and port: {error}", fix="host is a literal address, such as 127.0.0.1") from None
        if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
            raise UserError(f"the gateway needs {' and '.join(missing)}", fix=install_command("gateway"))
        import starlette.applications  # noqa: F401  # here, so that no episode waits for it
        import uvicorn.server  # noqa: F401

        self._rewarded = bool(reward_key_file)
        if reward_key_file:
            POSTED_REWARDS.make_key(reward_key_file)
        self._files = {name: _read(path) for name, path in _mapping(files, "files").items()}

    @property
    def address(self) -> str:
        """Of the gateway, as `SandboxSpec.network` names it."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    async def act(self, episode: LiveEpisode) -> str:
        if self.address not in episode.task.sandbox.network:
            raise TaskError(
                f"task {episode.task.id!r}: its sandbox cannot reach the gateway", fix=f'put "{self.address}" into sandbox.network'
            )
        if episode.turn_count:
            raise TaskError(
                f"task {episode.task.id!r} begins after turn {episode.turn_count}, and an outside program only at its own beginning",
                fix="use cases that begin at the start",
            )
        limits = episode.task.limits
        if limits.tool_calls is not None or limits.thinking_tokens is not None:
            raise TaskError(
                f"task {episode.task.id!r}: limits.tool_calls and limits.thinking_tokens hold for agents that ship; outside programs make"
                " their calls as they like",
                fix="leave them out; limits.turns and limits.all_tokens hold for every agent",
            )
        sandbox = await episode.sandbox()
        for name, content in self._files.items():
            await sandbox.write(name, content)
        if self._rewarded:
            POSTED_REWARDS.open(episode.id)
        session = Session(episode=episode, tokens=self._tokens, models=self._models)
        async with self._gateway().session(session) as key:
            episode.stage = "agent"
            result = await self._run(episode, session, sandbox, key)
            episode.stage = "agent"
            if self._rewarded and session.fault is None:
                await POSTED_REWARDS.wait(episode.id)
        return self._ended(episode, session, result)

    def _gateway(self) -> Gateway:
        """One for all agents of a process that listen at this address."""
        here = _gateways.setdefault(asyncio.get_running_loop(), {})
        return here.setdefault((self._host, self._port), Gateway(host=self._host, port=self._port))

    async def _run(self, episode: LiveEpisode, session: Session, sandbox: Sandbox, key: str) -> ExecResult | None:
        """The program's end; None: it was ended, some time after its session had come to one. Raises what the session broke at."""
        url = f"http://{self.address}"
        put_in = {"{model}": self._models[0], "{base_url}": f"{url}/v1", "{key}": key}
        prompt = "\n\n".join(message.content for message in episode.task.prompt)
        environment = {
            **{"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key},
            **{"AGENTRL_MODEL": self._models[0], "AGENTRL_SESSION": episode.id},
            **{name: _filled(value, put_in) for name, value in self._environment.items()},
        }
        argv = [_filled(one, {**put_in, "{key}": "{key}", "{prompt}": prompt}) for one in self._command]  # others can read arguments
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
                await _ended(program, over)

    def _ended(self, episode: LiveEpisode, session: Session, result: ExecResult | None) -> str:
        """The stop reason, with the blame for an end that is no good one."""
        if session.fault is not None:
            raise session.fault
        answered = session.counts["answered"]
        if result is None or session.limit:
            self._hand_in(episode, session, result)
            return session.limit
        if result.ok and answered:
            self._hand_in(episode, session, result)
            return "answered"
        status = f"status {result.exit_code}" if result.exit_code is not None else f"a kill ({result.reason})"
        words = result.stderr.strip()[-_SHOWN:] or result.stdout.strip()[-_SHOWN:]
        if not answered:
            if session.counts["client_gone"]:
                raise InfrastructureError("the program gave up before the policy had answered it")
            raise TaskError(f"the program {self._command[0]!r} ended with {status} before the policy had answered it: {words}")
        message = f"the program ended with {status}: {words}"
        episode.add_failure(Failure(stage="agent", blame=Blame.POLICY, kind="program_failed", message=message, turn=episode.turn_count))
        return "failed"

    def _hand_in(self, episode: LiveEpisode, session: Session, result: ExecResult | None) -> None:
        if self._answer == "message":
            episode.answer = session.last_words()
        elif self._answer == "stdout" and result is not None and result.ok:
            episode.answer = result.stdout.strip()


class _OwnTime:
    """Counts as the program's own the time in which it waits for no completion."""

    def __init__(self, episode: LiveEpisode, sandbox: Sandbox) -> None:
        self._episode, self._sandbox = episode, sandbox
        self._running = ExitStack()

    def __enter__(self) -> _OwnTime:
        self.busy(False)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def busy(self, busy: bool) -> None:
        stage = self._episode.stage
        self._running.close()
        if not busy:
            self._running.enter_context(self._episode.running(self._sandbox))
        self._episode.stage = stage


async def _ended(*tasks: asyncio.Task[object] | asyncio.Task[ExecResult]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _filled(text: str, values: Mapping[str, str]) -> str:
    """In one pass: what is put in is not looked at again."""
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], text)


def _texts(values: Sequence[str], name: str) -> tuple[str, ...]:
    good = not isinstance(values, str) and isinstance(values, Sequence) and values and all(isinstance(one, str) and one for one in values)
    if not good:
        raise UserError(f"rollout.agent_options.{name} must be a list of texts, none empty", fix=f'{name}=["python3", "agent.py"]')
    return tuple(values)


def _mapping(values: Mapping[str, str] | None, name: str) -> Mapping[str, str]:
    found = values or {}
    if not isinstance(found, Mapping) or not all(isinstance(one, str) for pair in found.items() for one in pair):
        raise UserError(f"rollout.agent_options.{name} must map texts to texts", fix=f'{name}={{"agent.py": "agents/mine.py"}}')
    return found


def _read(path: str) -> bytes:
    try:
        if Path(path).stat().st_size > MAX_FILE:
            raise UserError(f"rollout.agent_options.files: {path} has more than {MAX_FILE >> 20} MiB", fix="put it into the image")
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"rollout.agent_options.files: {path}: {error.strerror or error}", fix="name a file of the project") from None
