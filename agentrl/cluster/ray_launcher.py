"""Starts the parts of a run on the nodes of a Ray cluster. Ray is imported only when a cluster is used.

Ray reserves the resources of the plan. One actor for each part hosts its processes (`agentrl.cluster.ray_host`). The actors and processes
exit with the driver. A part counts as lost if its host does not respond, regardless of what Ray reports about the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import agentrl
from agentrl.base.installation import import_optional
from agentrl.base.user_code import printable
from agentrl.cluster.fit import ClusterNode, fit_plan, no_fit_error
from agentrl.cluster.plan import Bundle, ClusterPlan
from agentrl.cluster.process_host import HostedProcess, ProcessHost
from agentrl.cluster.ray_host import ID_FILE, LEASE_S, HostSettings, HostState, NodeHost, PartState, run_id
from agentrl.cluster.ray_nodes import list_nodes
from agentrl.cluster.ray_part import FETCH_S, PartPoller, RayPart
from agentrl.errors import LaunchError, RunFolderBusy, UserError
from agentrl.protocols.cluster import PartCommand

log = logging.getLogger(__name__)

CONNECT_S = 25.0
"""Deadline, in seconds, for reading the nodes of the cluster."""
RESERVE_S = 25.0
"""Deadline, in seconds, for the reservation of the plan."""
START_S = 60.0
"""Deadline, in seconds, for a start, which includes the replacement of a lost host."""
_RETRY_S = 0.5
_LEASE_ENDS_S = LEASE_S + 2.0  # seconds after the last call to a host until its processes have certainly exited
_DESCRIBE_S = 5.0
_OTHER_DRIVER_S = 3.0  # seconds within which a live driver polls its hosts
_CLOSE_S = 20.0
_QUIET = {"log_to_driver": False, "configure_logging": False, "logging_level": "ERROR"}


class RayLauncher:
    """A `Launcher` on a Ray cluster. Create a launcher with `open`, and close it in the same process."""

    is_local = False

    def __init__(self, ray: Any, plan: ClusterPlan, folder: Path, *, root: Path, nodes: list[ClusterNode]) -> None:
        self._ray, self._plan, self._nodes = ray, plan, nodes
        self._bundles = {bundle.name: bundle for bundle in plan.bundles()}
        self.driver_host = _own_address(ray, plan.address)
        self._here = ProcessHost(folder, root=root, host=self.driver_host)  # for parts on the driver's machine
        self._session = secrets.token_hex(8)
        self._settings = HostSettings(
            folder=str(folder.resolve()),
            root=str(root.resolve()),
            working_folder=os.getcwd(),
            driver=f"process {os.getpid()} on {socket.gethostname()}",
            session=self._session,
            run=run_id(folder),
        )
        self._folder = folder
        self.shared_folder = True  # whether all nodes with parts see the run folder; `open` checks it
        self._driver: tuple[str, str] | None = None  # the driver's address and key, for mirrors
        self._group: Any = None  # placement group
        self._actors: dict[str, Any] = {}  # by the name of the part
        self._parts: dict[str, RayPart] = {}  # the newest part of each name
        self._poller = PartPoller(ray)

    @classmethod
    async def open(cls, plan: ClusterPlan, folder: Path, *, root: Path) -> RayLauncher:
        """Connects to the cluster of a plan, stops the hosts of the run's earlier driver, reserves the plan and checks its nodes.

        Raises `UserError` if no cluster with this Ray version responds, the plan does not fit, or a node lacks this version of agentrl, and
        `LaunchError` if a host does not start. Each check takes at most about 30 s. Raises `RunFolderBusy` if another driver of this run
        uses the cluster.
        """
        ray = import_optional("ray", "cluster", needed_for=f"cluster.address={plan.address}")
        nodes = await asyncio.to_thread(list_nodes, plan.address, wait_s=CONNECT_S)
        if problems := fit_plan(plan, nodes).problems:
            raise no_fit_error(plan, nodes, problems)
        worker: Any = import_module("ray._private.worker")
        worker.print_to_stdstream = _log_message  # the original prints to the command's output
        with _own_signals():
            ray.init(address=plan.address, namespace=f"agentrl-{run_id(folder)}", **_QUIET)
        launcher = cls(ray, plan, folder, root=root, nodes=nodes)
        try:
            await launcher._end_earlier_session()
            await launcher._reserve()
            await launcher._check_nodes()
        except BaseException:
            await launcher.close()
            if not (folder / "recipe.json").exists():
                (folder / ID_FILE).unlink(missing_ok=True)  # the folder still counts as unused
            raise
        return launcher

    def cores(self, name: str) -> int | None:
        """Returns the CPU cores that the plan reserves for the part; None if the part runs on the driver's machine."""
        bundle = self._bundles.get(name)
        return None if bundle is None else max(1, int(bundle.cpus))

    async def start(self, command: PartCommand) -> RayPart | HostedProcess:
        """Starts a part on the node of its bundle, or on the driver's machine. Ray replaces a lost host if a node has enough free
        resources.

        Raises `LaunchError` if the part cannot be started on its host, or after about a minute, with the plan next to the nodes, if no node
        has enough free resources.
        """
        if command.name not in self._bundles:
            return self._here.start(command)
        try:
            return await self._start_on_node(command)
        except ConnectionError as error:
            raise LaunchError(f"{command.name} did not start: the connection to {self._plan.address} was lost: {error}") from error

    async def _start_on_node(self, command: PartCommand) -> RayPart:
        earlier, actor, start = self._parts.get(command.name), self._actor(command.name), uuid.uuid4().hex
        if earlier is not None and earlier.lost:
            if command.exclusive:
                await self._wait_for_lease(earlier)
            await self._replace_silent(actor)
        if self._driver is not None and command.needs:
            fetching = partial(actor.fetch.remote, self._driver, command.needs)
            if failure := await self._retry(command.name, fetching, timeout_s=FETCH_S):
                raise LaunchError(f"{command.name} does not start: {failure}")
        starting, pause_s = partial(actor.start.remote, start, command, self._driver), _RETRY_S
        if command.exclusive:  # a call whose response was lost may have started it on a host that Ray replaced
            await self._retry(command.name, actor.describe.remote, timeout_s=START_S)
            pause_s = _LEASE_ENDS_S
        state = await self._retry(command.name, starting, timeout_s=START_S + pause_s, pause_s=pause_s)
        if not isinstance(state, PartState):
            raise LaunchError(f"{command.name} does not start on a node of {self._plan.address}: {state}")
        log = None if self.shared_folder else self._folder / command.log
        if log is not None:
            log.parent.mkdir(exist_ok=True)
        part = self._parts[command.name] = RayPart(self._ray, actor, start, command.name, state, log=log, driver=self._driver)
        self._poller.add(part)
        return part

    async def use_driver(self, url: str, key: str) -> None:
        """Sets the address from which hosts fetch files into their mirrors of the run folder, and the key for it."""
        self._driver = url, key

    async def _check_nodes(self) -> None:
        """Starts the hosts. Checks the agentrl version of each node, and whether all nodes have the run folder. Raises `UserError` if a
        version differs from the driver's or a node cannot import agentrl, and `LaunchError` if a host does not start."""
        requests = [self._retry(name, self._actor(name).describe.remote, timeout_s=START_S) for name in self._bundles]
        states: list[HostState] = await asyncio.gather(*requests)
        for state in states:
            if state.version != agentrl.__version__:
                versions = f"{state.node} has agentrl {state.version}, but the driver has {agentrl.__version__}"
                raise UserError(versions, fix="install the same version on every node")
        self.shared_folder = all(state.sees_folder for state in states)

    async def close(self) -> None:
        """Stops all parts and releases the cluster. Idempotent."""
        self._poller.close()
        ends = [part.kill() for part in self._parts.values() if part.returncode is None]
        self._parts.clear()
        try:
            await self._here.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await asyncio.gather(*ends, return_exceptions=True)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await asyncio.to_thread(self._disconnect)

    def _disconnect(self) -> None:
        ray = self._ray
        if not ray.is_initialized():
            return
        with contextlib.suppress(ray.exceptions.RayError, OSError):
            for actor in self._actors.values():
                ray.kill(actor)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        self._actors.clear()
        ray.shutdown()

    def _actor(self, name: str) -> Any:
        if name not in self._actors:
            number = list(self._bundles).index(name)
            strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            options = {
                **_actor_options(self._bundles[name]),
                "name": f"{self._session}-{name}",
                "max_restarts": -1,
                "max_task_retries": 0,
                "scheduling_strategy": strategy(placement_group=self._group, placement_group_bundle_index=number),
            }
            self._actors[name] = self._ray.remote(NodeHost).options(**options).remote(self._settings)
        return self._actors[name]

    async def _retry(self, name: str, call: Callable[[], Any], *, timeout_s: float, pause_s: float = _RETRY_S) -> Any:
        """Calls a host until it responds, because Ray may be replacing it. The call must be idempotent. Raises `LaunchError` if the host
        does not respond within `timeout_s` seconds.

        `pause_s`: seconds between calls.
        """
        deadline, reason = time.monotonic() + timeout_s, "its host does not answer"
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                return await answer_of(call(), timeout_s=left_s)
            except TimeoutError:
                break
            except self._ray.exceptions.RayTaskError as error:
                raise LaunchError(f"{name} does not start: {error}") from error
            except self._ray.exceptions.RayError as error:
                reason = f"its host was lost: {error}".partition("\n")[0]
                if "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
                    fix = f"install agentrl {agentrl.__version__} in the environment of every node"
                    raise UserError(f"a node of {self._plan.address} cannot import agentrl: {reason}", fix=fix) from error
            await asyncio.sleep(pause_s)
        nodes = await asyncio.to_thread(self._current_nodes)
        raise LaunchError(
            f"{name} did not start on {self._plan.address} within {timeout_s:g} s ({reason}): a node may be lost, and no node has room\n"
            f"{no_fit_error(self._plan, nodes, [f'{name}: no node has room'])}"
        )

    def _current_nodes(self) -> list[ClusterNode]:
        with contextlib.suppress(UserError):
            return list_nodes(self._plan.address, wait_s=CONNECT_S)
        return self._nodes

    async def _reserve(self) -> None:
        """Reserves the plan. Raises `UserError` with the plan next to the nodes if other jobs leave too few resources."""
        bundles = list(self._bundles.values())
        if not bundles:
            return
        labels = [dict(bundle.labels) for bundle in bundles]
        self._group = self._ray.util.placement_group(
            [bundle.amounts() for bundle in bundles],
            strategy="PACK",
            bundle_label_selector=labels if any(labels) else None,
        )
        try:
            await answer_of(self._group.ready(), timeout_s=RESERVE_S)
        except TimeoutError:
            nodes = await asyncio.to_thread(self._current_nodes)
            problems = fit_plan(self._plan, nodes, now=True).problems or ("other jobs use the cluster",)
            raise no_fit_error(self._plan, nodes, problems) from None

    async def _end_earlier_session(self) -> None:
        """Stops the hosts of an earlier driver of this run. Raises `RunFolderBusy` if the earlier driver is alive, that is, if it polls its
        hosts."""
        ray, before = self._ray, dict[str, HostState]()
        names = [name for name in await asyncio.to_thread(ray.util.list_named_actors) if not name.startswith(self._session)]
        if not names:
            return
        for name in names:
            if (state := await self._described(name)) is not None:
                before[name] = state
        await asyncio.sleep(_OTHER_DRIVER_S if before else 0.0)
        for name, earlier in before.items():
            if (state := await self._described(name)) is not None and state.calls > earlier.calls:
                raise RunFolderBusy(
                    f"the run in {self._settings.folder} is in use by another agentrl on this cluster: {state.driver}",
                    fix="stop it, or choose a different --run-dir",
                )
        for name in names:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(ray.get_actor(name))
        log.warning("ended %d parts of an earlier driver of this run", len(names))

    async def _described(self, name: str) -> HostState | None:
        """Returns the state of another session's host; None if the host does not respond."""
        try:
            state = await answer_of(self._ray.get_actor(name).describe.remote(), timeout_s=_DESCRIBE_S)
        except (ValueError, TimeoutError, self._ray.exceptions.RayError):
            return None
        return state if isinstance(state, HostState) else None

    async def _replace_silent(self, actor: Any) -> None:
        """Kills a host that does not respond, with its processes, so that Ray replaces it. A suspended host process cannot kill the
        processes that it hosts."""
        try:
            await answer_of(actor.describe.remote(), timeout_s=_DESCRIBE_S)
        except TimeoutError:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor, no_restart=False)
        except self._ray.exceptions.RayError:  # Ray replaces the host
            return

    async def _wait_for_lease(self, part: RayPart) -> None:
        """Waits until a lost host's lease has expired, because a host that is only unreachable kills its processes then."""
        await asyncio.sleep(max(0.0, part.answered_at + _LEASE_ENDS_S - time.monotonic()))


async def answer_of(reference: Any, *, timeout_s: float) -> Any:
    """Returns the result of a Ray call. Raises `TimeoutError` after `timeout_s` seconds, and Ray's errors."""
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(reference.future())


def _actor_options(bundle: Bundle) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": bundle.cpus, "num_gpus": bundle.gpus, "resources": dict(bundle.custom)}
    return options | ({"memory": bundle.memory} if bundle.memory else {})


def _log_message(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    """Logs the first line of a message from the cluster, such as a message about a lost node."""
    for message in data["lines"]:
        log.info("Ray: %s", printable(str(message).partition("\n")[0], 500))


def _own_address(ray: Any, address: str) -> str:
    """Returns the address at which the nodes of the cluster reach this machine."""
    if not address.startswith("ray://"):
        return str(ray.util.get_node_ip_address())
    host, _, port = address.removeprefix("ray://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restores the signal handlers that `ray.init` replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(ValueError):  # this is not the main thread, so Ray replaced none
                signal.signal(number, handler)
