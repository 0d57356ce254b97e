"""The servers for the judges of a run. The servers are started and stopped with the policy's server, and restarted when they die.

A judge waits for a server that is starting, for at most the `patience_s` of its endpoint. A server that dies therefore delays scores, but
never causes a score of 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agentrl.base.files import sha256_file
from agentrl.base.liveness import RestartAlert, Restarts
from agentrl.base.user_code import describe_error
from agentrl.cluster.device import serving_device
from agentrl.config.recipe import Recipe
from agentrl.errors import AgentRLError, ServingError, UserError
from agentrl.judge import servers as known_servers
from agentrl.judge.reward_model import load_record
from agentrl.protocols import Launcher
from agentrl.session.models import find_model
from agentrl.version.model_folder import check_model_files, read_json

if TYPE_CHECKING:
    from agentrl.serving.judge_server import JudgeServer

log = logging.getLogger(__name__)

_WATCH_S = 0.5
_MAX_RESTARTS = 5  # maximum number of restarts of one server in a row; after that, its judges get an error
_DECIDES = ("*.safetensors", "config.json", "tokenizer*", "chat_template*")  # files that determine a model's output
_CLASSIFIES = "ForSequenceClassification"


def declare_judge_servers(recipe: Recipe, folders: Mapping[str, Path], *, weights: Mapping[str, str] | None = None) -> None:
    """Registers the servers that will be started for the judges of this process. Raises `UserError` if a model cannot be served.

    Args:
        folders: model folders by server name.
        weights: `JudgeServer.weights` by server name, received from the driver; for folders without weights on this host, which are not
            checked.
    """
    servers = {}
    for name, folder in folders.items():
        key, config = f"judge_servers.{name}", read_json(folder / "config.json")
        reward_model = is_reward_model(config)
        if weights is not None:
            servers[name] = known_servers.JudgeServer(folder=folder, weights=weights[name], reward_model=reward_model)
            continue
        check_model_files(folder, chat_template=not reward_model, key=f"{key}.model")
        positions, wanted = config.get("max_position_embeddings"), recipe.judge_servers[name].max_model_len
        if isinstance(positions, int) and positions < wanted:
            raise UserError(
                f"{key}.max_model_len={wanted}, but the model has only {positions} positions", fix=f"set {key}.max_model_len={positions}"
            )
        servers[name] = known_servers.JudgeServer(folder=folder, weights=_hash(folder), reward_model=reward_model)
    known_servers.register_servers(servers)


def is_reward_model(config: Mapping[str, Any]) -> bool:
    """Whether a model returns numbers instead of text, according to its config.json."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(isinstance(name, str) and name.endswith(_CLASSIFIES) for name in architectures)


def check_judge_servers_used() -> None:
    """Raises `UserError` if a registered server is used by no judge. Call this function after the recipe's verifiers are loaded."""
    if idle := known_servers.unused_servers():
        raise UserError(
            f"judge_servers.{idle[0]} would start a server that no judge of the recipe uses",
            fix=f'use it: Endpoint(url=served("{idle[0]}"), model="{idle[0]}"), or remove the section',
        )


def check_reward_model_vocabulary(policy: Path) -> None:
    """Raises `UserError` if a reward model reads the policy's tokens but has a different vocabulary.

    Args:
        policy: folder of the policy's model.
    """
    for name, known in known_servers.registered_servers().items():
        if known.reward_model and not load_record(known.folder).shows and _vocabulary(known.folder) != _vocabulary(policy):
            raise UserError(
                f"judge_servers.{name}.model reads the tokens of episodes, but its vocabulary differs from that of policy.model",
                fix="train it from this policy (agentrl tune reward RUN), or train it on labels (--labels), so that it reads text",
            )


def _vocabulary(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    model = read_json(path).get("model") if path.is_file() else None
    return model.get("vocab") if isinstance(model, dict) else None


def declare_judges(recipe: Recipe, *, root: Path) -> dict[str, Path]:
    """Registers the judges' servers for this process, and returns their model folders. Raises `UserError` if a model cannot be used."""
    folders = {
        name: find_model(config.model, root, chat_template=False, key=f"judge_servers.{name}.model")
        for name, config in recipe.judge_servers.items()
    }
    declare_judge_servers(recipe, folders)
    return folders


class JudgeServers:
    """The servers in a recipe's `judge_servers` section, which must be registered first. The servers run and are supervised in an `async
    with` block."""

    def __init__(
        self,
        recipe: Recipe,
        folders: Mapping[str, Path],
        *,
        folder: Path,
        launcher: Launcher | None = None,
        alert: Callable[[str], None] = log.warning,
    ) -> None:
        """
        Args:
            folders: model folders by server name.
            folder: the run folder, to which logs are written.
            launcher: starts the servers; None starts them on this machine.
            alert: called with a message for the user when a server is restarted or will no longer be restarted.
        """
        self._restarts = {name: Restarts() for name in folders}
        self._recipe, self._models, self._folder, self._alert = recipe, folders, folder, alert
        self._launcher = launcher
        self._watching: list[asyncio.Task[None]] = []
        self._first = {name: asyncio.Event() for name in folders}
        self._failed: dict[str, AgentRLError] = {}
        self._running: dict[str, JudgeServer] = {}

    @property
    def restarts(self) -> dict[str, int]:
        """The number of restarts of each server so far."""
        return {name: one.total for name, one in self._restarts.items()}

    async def __aenter__(self) -> Self:
        self._watching = [asyncio.create_task(self._keep(name), name=f"judge server {name}") for name in self._models]
        return self

    async def ready(self) -> None:
        """Waits until each server has responded. If servers could not be started, raises the error of the first of them."""
        for name, event in self._first.items():
            await event.wait()
            if (error := self._failed.get(name)) is not None:
                raise error

    def pid(self, name: str) -> int | None:
        """Returns the process id of a server on its host; None if the server is not running."""
        server = self._running.get(name)
        return None if server is None else server.pid

    async def __aexit__(self, *error: object) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._watching.clear()
        await asyncio.gather(*(server.stop() for server in self._running.values()))
        self._running.clear()

    async def _keep(self, name: str) -> None:
        """Runs one server, and restarts it when it dies. If the server dies too often in a row, it is not restarted, and calls of its
        judges fail."""
        known = known_servers.registered_servers()[name]
        known.refused = ""  # an earlier session of this process, before a pause for a full disk, may have ended because the server failed
        try:
            while True:
                end = await self._serve(name, known)
                failures = self._restarts[name].failed()
                if failures > _MAX_RESTARTS:
                    known.refused = f"the judge's server {name} died {failures} times in a row; see logs/judge-{name}.log"
                    self._alert(known.refused)
                    return
                why = f"the judge's server {name} is restarted: {end}; restart {failures} of at most {_MAX_RESTARTS} in a row"
                self._alert(RestartAlert("judge", why))
        except Exception as error:
            known.refused = f"the judge's server {name} cannot be started: {describe_error(error)}"
            self._failed[name] = error if isinstance(error, AgentRLError) else ServingError(known.refused)
            self._alert(known.refused)
        finally:
            self._first[name].set()

    async def _serve(self, name: str, known: known_servers.JudgeServer) -> str:
        """Runs the server until it dies or makes no progress. Returns the reason."""
        from agentrl.serving.judge_server import JudgeServer

        server = JudgeServer(
            name,
            self._recipe.judge_servers[name],
            model=known.folder,
            reward_model=known.reward_model,
            folder=self._folder,
            device=serving_device(self._recipe),
            launcher=self._launcher,
        )
        self._running[name] = server
        try:
            await server.start()
            known.key, known.url = server.key, server.url
            self._first[name].set()
            self._restarts[name].started()
            while await server.alive():
                self._restarts[name].progress()
                await asyncio.sleep(_WATCH_S)
            return server.end_reason
        finally:
            known.url = known.key = ""
            await server.stop()
            self._running.pop(name, None)


@asynccontextmanager
async def standalone_judge_servers(recipe: Recipe | None, *, root: Path) -> AsyncIterator[None]:
    """Runs the servers for the judges of a recipe, if it has any. If an error occurs, the logs of the servers are kept.

    Raises `UserError` if a model cannot be served, and `ServingError` if a server does not start.
    """
    models = {} if recipe is None else declare_judges(recipe, root=root)
    if recipe is None or not models:
        yield
        return
    work = Path(tempfile.mkdtemp(prefix="agentrl-judges-"))
    print(f"starting judge servers {', '.join(models)}; their logs are in {work / 'logs'}", file=sys.stderr)
    async with JudgeServers(recipe, models, folder=work) as servers:
        await servers.ready()
        yield
    shutil.rmtree(work, ignore_errors=True)


def _hash(folder: Path) -> str:
    """Returns the sha256 hash of the files that determine a model's output."""
    whole = hashlib.sha256()
    for path in sorted({path for pattern in _DECIDES for path in folder.glob(pattern) if path.is_file()}):
        whole.update(f"{path.name} {sha256_file(path)}\n".encode())
    return whole.hexdigest()
