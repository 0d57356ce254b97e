"""Cells from `kubernetes-sigs/agent-sandbox`. Each cell is the pod of a `SandboxClaim` on a warm pool; the backend creates a claim when it
needs a cell.

The pool's template runs `agentrl sandbox serve` (`agentrl cluster manifest --cells` writes the pool and the template). Sandboxes therefore
open as quickly as in other cells, programs run under the template's runtime class, such as gVisor, and the controller of agent-sandbox
replaces failed pods.

Claims are leased: each expires `LEASE_S` after this driver last renewed it, so a driver that dies leaves no claims behind.
Source of the fields: extensions.agents.x-k8s.io/v1beta1 of agent-sandbox 0.5.6.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import re
import secrets
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx

from agentrl.base.error_text import one_line_error, reason_text
from agentrl.errors import SandboxError, UserError
from agentrl.sandbox import images
from agentrl.sandbox.cell import wire
from agentrl.sandbox.cell.backend import CellBackend, CellState
from agentrl.sandbox.waiting import spawn

log = logging.getLogger(__name__)

API_VERSION = "extensions.agents.x-k8s.io/v1beta1"
LEASE_S, RENEW_S = 600.0, 60.0
MAX_UNREADY = 3
"""A claim is dropped if its pod is not ready at this number of renewals in a row. Before that, a late readiness probe may be the cause."""
READY_S = 110.0
"""Seconds within which a claim must have a ready pod."""
REQUEST_S = 10.0
POLL_S = 0.5
PAUSE_S = 5.0
_MAX_REPLY = 1 << 20
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")


class KubernetesApi:
    """Calls the Kubernetes API. The defaults are for a process in a pod, which has the API's address, a token and the certificate
    authority. Raises `UserError` if `url` is empty outside a pod, or if the certificate authority cannot be read."""

    def __init__(self, url: str = "", *, token: str = "", authority: str = "") -> None:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not url and not host:
            raise UserError(
                "this process is not in a pod, so the address of the Kubernetes API is unknown", fix="set the options api and token"
            )
        self._token = token
        verify: ssl.SSLContext | bool = True
        if authority or not url:
            try:
                verify = ssl.create_default_context(cafile=authority or str(_ACCOUNT / "ca.crt"))
            except (OSError, ssl.SSLError) as error:
                raise UserError(
                    f"cannot read the certificate authority of the Kubernetes API: {reason_text(error)}",
                    fix="set authority to the path of its file",
                ) from None
        address = url or f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._date: tuple[datetime, float] | None = None  # of the newest reply: the API's time, and the local monotonic time
        self._client = httpx.AsyncClient(base_url=address, verify=verify, timeout=REQUEST_S, follow_redirects=False)

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Sends a request. Returns the object in the reply, or None if there is no object of that name. Raises `SandboxError` if the
        request fails."""
        try:
            kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
            headers = {"Content-Type": kind, "Authorization": f"Bearer {self._token or (_ACCOUNT / 'token').read_text().strip()}"}
            content = None if body is None else json.dumps(body).encode()
            async with asyncio.timeout(REQUEST_S), self._client.stream(method, path, content=content, headers=headers) as reply:
                data = b""
                async for piece in reply.aiter_raw(65536):
                    data += piece
                    if len(data) > _MAX_REPLY:
                        raise SandboxError(f"the Kubernetes API: {method} {path}: the reply has more than {_MAX_REPLY} bytes")
            self._read_date(reply.headers.get("Date", ""))
            if reply.status_code == httpx.codes.NOT_FOUND:
                return None
            parsed = json.loads(data)
            if not isinstance(parsed, dict) or not reply.is_success:
                text = parsed.get("message") if isinstance(parsed, dict) else ""
                raise SandboxError(f"the Kubernetes API: {method} {path}: status {reply.status_code} {str(text)[:300]}")
            return parsed
        except (httpx.HTTPError, OSError, ValueError, RecursionError) as error:
            raise SandboxError(f"the Kubernetes API: {method} {path}: {one_line_error(error)}") from None

    def now(self) -> datetime:
        """Returns the API's time, so that leases do not depend on the local clock. Before the first reply, returns the local time."""
        if self._date is None:
            return datetime.now(UTC)
        return self._date[0] + timedelta(seconds=time.monotonic() - self._date[1])

    def _read_date(self, text: str) -> None:
        with contextlib.suppress(ValueError):
            date = parsedate_to_datetime(text)
            self._date = date.replace(tzinfo=date.tzinfo or UTC), time.monotonic()

    async def close(self) -> None:
        """Closes the connections to the API."""
        await self._client.aclose()


@dataclass(frozen=True, slots=True)
class _Claim:
    name: str
    cell: CellState


class ClaimBackend(CellBackend):
    """Opens sandboxes in cells that it claims from the warm pool `pool`: at most `cells` cells with `slots` sandboxes each. Raises
    `UserError` if an option is invalid."""

    name = "agent-sandbox"
    reach_s = READY_S + PAUSE_S

    def __init__(
        self,
        *,
        run_label: str,
        root: Path,
        api: KubernetesApi,
        namespace: str,
        pool: str,
        key: str,
        slots: int = 16,
        cells: int = 16,
        progress: images.Progress = images.no_progress,
    ) -> None:
        super().__init__(run_label=run_label, root=root, addresses=(), key=key, progress=progress)
        if not _NAME.fullmatch(pool) or not _NAME.fullmatch(namespace) or slots < 1 or cells < 1:
            raise UserError(
                f"sandbox.backend={self.name}: invalid option: pool {pool[:80]!r}, namespace {namespace[:80]!r}, "
                f"slots {slots} or cells {cells}",
                fix="use Kubernetes names for pool and namespace, and at least 1 for slots and cells",
            )
        self._api, self._pool, self._slots, self._most = api, pool, slots, cells
        self._path = f"/apis/{API_VERSION}/namespaces/{namespace}/sandboxclaims"
        self._claims: list[_Claim] = []
        self._claiming: asyncio.Task[None] | None = None
        self._paused_until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()  # cancelled by `close`, which waits for deletions
        self._deletions: set[asyncio.Task[None]] = set()

    async def _candidates(self) -> list[CellState]:
        now = asyncio.get_running_loop().time()
        usable = [claim.cell for claim in self._claims if claim.cell.open < self._slots and claim.cell.avoided_until <= now]
        if not usable and self._claiming is None and now > self._paused_until and len(self._claims) < self._most:
            self._claiming = spawn(self._claim(), self._tasks)
        return sorted(usable, key=lambda cell: cell.open)

    async def _claim(self) -> None:
        """Creates a claim and waits for its pod. If the claim fails, the openings that wait for it report the error."""
        name, loop = f"agentrl-{secrets.token_hex(8)}", asyncio.get_running_loop()
        try:
            await self._api.call("GET", f"{self._path}/{name}")  # does not exist; the reply has the API's time, for the lease
            body = {
                "apiVersion": API_VERSION,
                "kind": "SandboxClaim",
                "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "agentrl"}},
                "spec": {"warmPoolRef": {"name": self._pool}, "lifecycle": self._lifecycle()},
            }
            claim: dict[str, Any] | None = None
            posting = asyncio.ensure_future(self._api.call("POST", self._path, body))
            try:
                claim = await asyncio.shield(posting)
                async with asyncio.timeout(READY_S):
                    while not (address := _address(claim)):
                        await asyncio.sleep(POLL_S)
                        claim = await self._api.call("GET", f"{self._path}/{name}")
                        if claim is None:
                            raise SandboxError("it was deleted")
                self._claims.append(_Claim(name, CellState((address, wire.PORT))))
                self._cells[address, wire.PORT] = self._claims[-1].cell
                spawn(self._renew(self._claims[-1]), self._tasks)
            except BaseException as error:
                await asyncio.wait([posting])  # a request that is cancelled may still create the claim
                spawn(self._delete(name), self._deletions)
                if isinstance(error, TimeoutError):
                    raise SandboxError(f"no pod was ready after {READY_S:.0f} s: {_reason(claim)}") from None
                raise
        except SandboxError as error:
            self._problem = f"claim {name} on the warm pool {self._pool}: {error}"
            self._paused_until = loop.time() + PAUSE_S
        finally:
            self._claiming = None

    async def _renew(self, claim: _Claim) -> None:
        """Extends the lease of a claim until the claim is dropped. Drops it if it was deleted, if its pod was replaced or is not ready at
        `MAX_UNREADY` renewals in a row, or if 10 renewals in a row fail."""
        failures = unready = 0
        while claim in self._claims and failures < LEASE_S / RENEW_S:
            await asyncio.sleep(RENEW_S)
            try:
                now = await self._api.call("PATCH", f"{self._path}/{claim.name}", {"spec": {"lifecycle": self._lifecycle()}})
                failures = 0
            except SandboxError as error:
                log.warning("cannot renew claim %s: %s", claim.name, error)
                failures += 1
                continue
            address = _address(now)
            unready = 0 if address else unready + 1
            if claim not in self._claims:  # dropped meanwhile
                break
            if now is None or unready == MAX_UNREADY or address not in ("", claim.cell.address[0]):
                log.warning("claim %s is dropped: %s", claim.name, "it was deleted" if now is None else f"its pod is lost: {_reason(now)}")
                break
        self._drop(claim)

    def _drop(self, claim: _Claim) -> None:
        if claim in self._claims:
            self._claims.remove(claim)
            self._cells.pop(claim.cell.address, None)
            spawn(self._delete(claim.name), self._deletions)

    async def _delete(self, name: str) -> None:
        try:
            await self._api.call("DELETE", f"{self._path}/{name}")
        except SandboxError as error:  # the claim expires with its lease
            log.warning("cannot delete claim %s, which expires within %.0f s: %s", name, LEASE_S, error)

    def _leave(self, cell: CellState) -> None:
        """Records that a sandbox in the cell was closed, and drops all claims whose cells have no sandboxes, except one claim."""
        super()._leave(cell)
        idle = [claim for claim in self._claims if claim.cell.open == 0]
        for claim in idle[1:]:
            self._drop(claim)

    async def _close(self) -> None:
        try:
            await super()._close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for claim in self._claims[:]:
                self._drop(claim)
            await asyncio.gather(*self._deletions, return_exceptions=True)  # each has the deadline of a request
        finally:
            await self._api.close()

    def _lifecycle(self) -> dict[str, str]:
        end = self._api.now() + timedelta(seconds=LEASE_S)
        return {"shutdownTime": end.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"}


def _conditions(claim: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    status = (claim or {}).get("status")
    listed = status.get("conditions") if isinstance(status, dict) else None
    conditions = listed if isinstance(listed, list) else []
    return [condition for condition in conditions if isinstance(condition, dict) and condition.get("type") == "Ready"]


def _address(claim: Mapping[str, Any] | None) -> str:
    """Returns the address of a claim's pod; empty if the claim has no ready pod."""
    if claim is None or not any(condition.get("status") == "True" for condition in _conditions(claim)):
        return ""
    try:
        return str(ipaddress.ip_address(claim["status"]["sandbox"]["podIPs"][0]))
    except (KeyError, IndexError, TypeError, ValueError):
        return ""


def _reason(claim: Mapping[str, Any] | None) -> str:
    return (
        "; ".join(f"{condition.get('reason')}: {condition.get('message')}"[:300] for condition in _conditions(claim)) or "it has no status"
    )


def open_claims(
    *,
    root: Path,
    run_label: str,
    pool: str = "",
    key: str = "",
    namespace: str = "",
    slots: int = 16,
    cells: int = 16,
    api: str = "",
    token: str = "",
    authority: str = "",
) -> ClaimBackend:
    """Returns the backend for the recipe's option `sandbox.backend=agent-sandbox`. Raises `UserError` if the option `pool` or `key` is
    missing, or another option is invalid."""
    if not pool or not key:
        fix = 'write Part("agent-sandbox", options={"pool": "NAME", "key": "env:AGENTRL_CELL_KEY"})'
        raise UserError("sandbox.backend=agent-sandbox requires the options pool and key", fix=fix)
    if not namespace:
        try:
            namespace = (_ACCOUNT / "namespace").read_text().strip()
        except OSError:
            namespace = "default"
    calls = KubernetesApi(api, token=token, authority=authority)
    return ClaimBackend(root=root, run_label=run_label, api=calls, namespace=namespace, pool=pool, key=key, slots=slots, cells=cells)
