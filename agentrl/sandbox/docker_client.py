"""The local Docker daemon: its address, whether it answers, and this process's connections to it. All functions block."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Literal

import docker
import requests
import urllib3
from docker.errors import APIError, DockerException, NotFound
from docker.transport import UnixHTTPAdapter

from agentrl.errors import SandboxError, SandboxTimeout, SandboxUnavailable
from agentrl.sandbox import waiting
from agentrl.sandbox.lease import lease

DEFAULT = "unix:///var/run/docker.sock"
API_VERSION = "1.41"  # Docker Engine 20.10
LABEL_RUN, LABEL_LEASE, LABEL_SHARED = "agentrl.run", "agentrl.lease", "agentrl.shared"
"""Labels of a container: its run, its driver's lease, and whether several sandboxes share it."""
REQUEST_S = 60.0
QUICK_S = 15.0
"""Timeout of requests that only inspect or remove containers."""
LOOK_S = 5.0
"""How long the daemon may be silent during a build before this process pings it."""
_PING_S = 2.0
_POOLS = 2  # connections per thread; the library opens one per requested URL host, and each container has a different host
_thread = threading.local()

State = Literal["answers", "silent", "absent"]


def daemon_address() -> str:
    """Returns the local daemon's address, which is `$DOCKER_HOST` or the default. Raises `SandboxUnavailable` if the address is not a
    socket on this machine.

    Sandboxes reach the driver through a mounted socket, which a remote daemon cannot provide.
    """
    url = os.environ.get("DOCKER_HOST", "") or DEFAULT
    if not url.startswith("unix://"):
        raise SandboxUnavailable(f"DOCKER_HOST={url} is not a daemon on this machine", fix="unset DOCKER_HOST, or use bubblewrap")
    return url


def daemon_state(timeout_s: float = _PING_S) -> State:
    """Pings the local daemon. Returns `answers`, `silent` if the daemon accepts the connection but does not report success within
    `timeout_s`, or `absent` if this process cannot connect. Raises `SandboxUnavailable` as `daemon_address` does."""
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(timeout_s)
            link.connect(daemon_address().removeprefix("unix://"))
            link.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return "answers" if b" 200 " in link.recv(64) else "silent"
    except TimeoutError:
        return "silent"
    except OSError:
        return "absent"


def daemon_answers(timeout_s: float = _PING_S) -> bool:
    """Whether the local Docker daemon answers a ping within `timeout_s`. Raises `SandboxUnavailable` as `daemon_address` does."""
    return daemon_state(timeout_s) == "answers"


def new_client(timeout_s: float) -> docker.APIClient:
    """Returns a new client for the local daemon. The caller closes it."""
    return docker.APIClient(base_url=daemon_address(), version=API_VERSION, timeout=timeout_s)


def client() -> docker.APIClient:
    """Returns this thread's client. The library's clients are not thread-safe."""
    if getattr(_thread, "address", "") != daemon_address():
        api = new_client(REQUEST_S)
        # For local sockets the library ignores `num_pools` (docker 7.2).
        api.mount("http+docker://", UnixHTTPAdapter(daemon_address().removeprefix("unix://"), REQUEST_S, pool_connections=_POOLS))
        _thread.api, _thread.address = api, daemon_address()
    return _thread.api


@contextlib.contextmanager
def connection(timeout_s: float = REQUEST_S) -> Iterator[docker.APIClient]:
    """Yields this thread's client with the timeout `timeout_s`. Raises a timeout in the block as `SandboxTimeout`, and other errors of the
    library as `SandboxError`."""
    api = client()
    previous, api.timeout = api.timeout, timeout_s
    try:
        yield api
    except (requests.Timeout, urllib3.exceptions.TimeoutError) as error:
        raise SandboxTimeout(f"the Docker daemon at {daemon_address()} did not answer in time: {error}") from error
    except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise SandboxError(f"Docker daemon: {error}") from error
    finally:
        api.timeout = previous


def reachable(timeout_s: float = _PING_S) -> bool:
    """Whether a local daemon answers. Raises `SandboxTimeout` if a daemon listens but does not answer within `timeout_s`."""
    try:
        current = daemon_state(timeout_s)
    except SandboxUnavailable:  # the daemon is on another machine
        return False
    if current == "silent":
        raise SandboxTimeout(f"the Docker daemon at {daemon_address()} accepts connections but does not answer; restart it")
    return current == "answers"


def create_and_start(name: str, container: dict[str, Any]) -> None:
    """Creates a container from the body of a create request, and starts it. Raises `SandboxError` if the daemon fails or refuses; the
    container may then exist."""
    with connection() as api:
        api.create_container_from_config(container, name=name)
        api.start(name)


def is_running(name: str) -> bool:
    """Whether a container exists and is running. Raises `SandboxError` if the daemon fails."""
    with connection(QUICK_S) as api:
        try:
            return bool(api.inspect_container(name)["State"]["Running"])
        except NotFound:
            return False


def containers(label: str) -> dict[str, dict[str, str]]:
    """Returns a mapping name -> labels of all containers with `label` (`key` or `key=value`), running or not. Raises `SandboxError` if the
    daemon fails."""
    with connection(QUICK_S) as api:
        listed = api.containers(all=True, filters={"label": [label]})
    return {item["Names"][0].lstrip("/"): item["Labels"] for item in listed if item["Names"]}


def remove(name: str) -> None:
    """Kills and removes a container. Does nothing if the container does not exist or is being removed. Raises `SandboxError` if the daemon
    fails."""
    with connection(QUICK_S) as api:
        try:
            api.remove_container(name, force=True, v=True)
        except APIError as error:
            if error.status_code not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                raise


def await_removed(names: frozenset[str], timeout_s: float) -> None:
    """Waits up to `timeout_s` for the daemon to remove the containers `names` of this process, then removes those that remain. Raises
    `SandboxError` if the daemon fails."""
    deadline = time.monotonic() + timeout_s
    while left := names & containers(f"{LABEL_LEASE}={lease()}").keys():
        if time.monotonic() >= deadline:
            for name in left:
                remove(name)
            return
        time.sleep(0.1)


def daemon_messages(
    request: Callable[[docker.APIClient], Iterable[Any]], *, what: str, timeout_s: float, late: Exception | None = None
) -> Iterator[Any]:
    """Yields the daemon's messages in response to a request. A thread reads the messages, so that the caller can be cancelled and a hung
    daemon can be distinguished from a slow step. Closing the connection stops the daemon's work.

    Args:
        what: the daemon's work, for errors.
        timeout_s: timeout of the connection.
        late: raised if the work takes longer than `timeout_s`; None allows it to take longer.

    Raises the errors of `request`, and `SandboxError` if the daemon stops responding or the caller is cancelled.
    """
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    abandoned = threading.Event()
    threading.Thread(target=_read_messages, args=(request, timeout_s, messages, abandoned), name=f"docker {what}", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            waiting.raise_if_cancelled()
            if late is not None and time.monotonic() > deadline:
                raise late
            try:
                message = messages.get(timeout=LOOK_S)
            except queue.Empty:
                if not reachable():
                    raise SandboxError(f"the Docker daemon at {daemon_address()} stopped during a {what}") from None
                continue
            if message is None:
                return
            if isinstance(message, Exception):
                raise message
            yield message
    finally:
        abandoned.set()


def _read_messages(
    request: Callable[[docker.APIClient], Iterable[Any]], timeout_s: float, messages: queue.SimpleQueue[Any], abandoned: threading.Event
) -> None:
    """Puts the daemon's messages into `messages`, followed by None, or by the exception if reading fails."""
    try:
        with contextlib.closing(new_client(timeout_s)) as api:
            for message in request(api):
                if abandoned.is_set():
                    return
                messages.put(message)
        messages.put(None)
    except Exception as error:  # `daemon_messages` raises it
        messages.put(error)
