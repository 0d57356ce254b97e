"""Cells from agent-sandbox: claims, leases and faults, against an API server that validates with the project's resource definitions.

No cluster is involved: the server here is the API and the controller at once, and its pods are cells in this process.
"""

import asyncio
import contextlib
import itertools
import json
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jsonschema
import pytest

from agentrl.config.tools import SandboxConfig
from agentrl.errors import SandboxError, SandboxUnavailable, UserError
from agentrl.sandbox import open_backend
from agentrl.sandbox.cell import ClaimBackend, claims, open_claims, wire
from agentrl.sandbox.cell.server import Cell
from tests.sandbox.building import SPEC, leftovers
from tests.waiting import until

pytestmark = pytest.mark.bubblewrap
KEY = "0123456789abcdef" * 2
SCHEMA = json.loads((Path(__file__).parent / "agent_sandbox.schema.json").read_text())["sandboxclaims"]
PATH = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/runs/sandboxclaims"
_hosts = itertools.count(2)


class Api:
    """The API server. `answer` replaces the reply to a request if it returns (status, bytes)."""

    def __init__(self):
        self.claims, self.deleted, self.requests, self.pods = {}, [], [], []
        self.answer = lambda method, path: None

    def handle(self, method, path, body, headers):
        self.requests.append((method, path))
        if (replaced := self.answer(method, path)) is not None:
            return replaced
        assert headers["Authorization"] == "Bearer account" and path.startswith(PATH), path
        name = path.removeprefix(PATH).removeprefix("/")
        if method == "POST":
            jsonschema.validate(body, SCHEMA)
            assert body["spec"]["warmPoolRef"] == {"name": "cells"}
            name = body["metadata"]["name"]
            ready = {"type": "Ready", "status": "True" if self.pods else "False", "reason": "R", "message": "no node"}
            pod = {"sandbox": {"name": "s", "podIPs": [self.pods.pop(0)]}} if self.pods else {}
            self.claims[name] = body | {"status": {"conditions": [ready | {"lastTransitionTime": "2026-01-01T00:00:00Z"}], **pod}}
            jsonschema.validate(self.claims[name], SCHEMA)
        if name not in self.claims:
            return 404, b'{"kind": "Status", "message": "not found"}'
        if method == "PATCH":
            assert headers["Content-Type"] == "application/merge-patch+json"
            self.claims[name]["spec"] |= body["spec"]
            jsonschema.validate(self.claims[name], SCHEMA)
        if method == "DELETE":
            self.deleted.append(name)
            return 200, json.dumps(self.claims.pop(name)).encode()
        return 201 if method == "POST" else 200, json.dumps(self.claims[name]).encode()


@pytest.fixture
def api():
    state = Api()

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            status, data = state.handle(self.command, self.path, body, self.headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = answer

        def log_message(self, *_):
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    state.url = f"http://127.0.0.1:{serving.server_address[1]}"
    yield state
    serving.shutdown()
    thread.join()
    serving.server_close()


@contextlib.asynccontextmanager
async def pods(api, count, **options):
    """Cells at different addresses, for later claims."""
    cells = [Cell(KEY, **options) for _ in range(count)]
    try:
        for cell in cells:
            host = f"127.0.1.{next(_hosts)}"
            await cell.start(host, wire.PORT)
            api.pods.append(host)
        yield cells
    finally:
        for cell in cells:
            await cell.close()
        assert leftovers() == []


@contextlib.asynccontextmanager
async def claiming(root, api, **options):
    opened = open_claims(root=root, run_label="t", pool="cells", key=KEY, namespace="runs", api=api.url, token="account", **options)
    try:
        yield opened
    finally:
        await opened.close()
        assert api.claims == {}, "every claim is deleted"


async def test_cells_are_claimed_as_sandboxes_need_them_and_deleted(root, api):
    async with pods(api, 3) as cells, claiming(root, api, slots=2) as opened:
        sandboxes = [await opened.open(SPEC) for _ in range(5)]
        assert [len(cell._running) for cell in cells] == [2, 2, 1] and len(api.claims) == 3
        assert (await sandboxes[4].exec(["echo", "x"], timeout_s=20)).stdout == "x\n"
        lifecycles = [claim["spec"]["lifecycle"] for claim in api.claims.values()]
        for lifecycle in lifecycles:
            remaining_s = (datetime.fromisoformat(lifecycle["shutdownTime"]) - datetime.now(UTC)).total_seconds()
            assert claims.LEASE_S - 30 < remaining_s <= claims.LEASE_S and lifecycle["shutdownPolicy"] == "Delete"
        for sandbox in sandboxes:
            await sandbox.close()
        await until(lambda: len(api.claims) == 1)  # one claim is kept for the next sandbox
        assert [state.open for state in opened._cells.values()] == [0]


async def test_leases_are_renewed_and_a_lost_pod_is_dropped(root, api, monkeypatch):
    monkeypatch.setattr(claims, "RENEW_S", 0.05)
    async with pods(api, 2), claiming(root, api) as opened:
        sandbox = await opened.open(SPEC)
        (name,) = api.claims
        api.claims[name]["spec"]["lifecycle"]["shutdownTime"] = "2020-01-01T00:00:00Z"
        await until(lambda: api.claims[name]["spec"]["lifecycle"]["shutdownTime"] > "2026")
        assert (await sandbox.exec(["true"], timeout_s=20)).ok
        api.claims[name]["status"]["conditions"][0]["status"] = "False"
        await until(lambda: name in api.deleted)
        await (await opened.open(SPEC)).close()
        assert len(api.claims) == 1


async def test_a_pod_that_is_briefly_not_ready_keeps_its_sandboxes(root, api, monkeypatch):
    """Readiness probes fail while a node is busy; a deleted claim ends every sandbox in the pod."""
    monkeypatch.setattr(claims, "RENEW_S", 0.05)
    async with pods(api, 1), claiming(root, api) as opened:
        sandbox = await opened.open(SPEC)
        (name,) = api.claims
        renewals = itertools.count(1)

        def flap(method, path):
            if method == "PATCH":
                api.claims[name]["status"]["conditions"][0]["status"] = "False" if next(renewals) % claims.MAX_UNREADY else "True"

        api.answer = flap
        await until(lambda: api.deleted or len([method for method, _ in api.requests if method == "PATCH"]) > 2 * claims.MAX_UNREADY)
        assert (await sandbox.exec(["true"], timeout_s=20)).ok and not api.deleted


async def test_an_idle_claim_that_was_deleted_by_its_backend_is_not_reported_as_lost(root, api, monkeypatch, caplog):
    monkeypatch.setattr(claims, "RENEW_S", 0.1)
    async with pods(api, 2), claiming(root, api, slots=1) as opened:
        for sandbox in [await opened.open(SPEC) for _ in range(2)]:
            await sandbox.close()
        await until(lambda: len(api.claims) == 1 and len(opened._tasks) == 1)  # the task of the deleted claim has ended
    assert "is dropped" not in caplog.text


@pytest.mark.parametrize("loss", ["replaced", "deleted"])
async def test_a_claim_whose_pod_is_replaced_or_deleted_is_dropped_at_the_next_renewal(loss, root, api, monkeypatch):
    monkeypatch.setattr(claims, "RENEW_S", 0.05)
    monkeypatch.setattr(claims, "MAX_UNREADY", 10**9)
    async with pods(api, 1), claiming(root, api) as opened:
        await (await opened.open(SPEC)).close()
        (name,) = api.claims
        if loss == "replaced":
            api.claims[name]["status"]["sandbox"]["podIPs"] = ["127.0.9.9"]
        else:
            del api.claims[name]
        await until(lambda: not opened._claims)


@pytest.mark.parametrize("hours", [-3, 3])
async def test_lease_is_right_if_the_clock_of_this_machine_is_wrong(hours, root, api, monkeypatch):
    """The controller compares the lease with its own clock: an expired lease would end every sandbox at once."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(hours=hours)

    monkeypatch.setattr(claims, "datetime", Clock)
    monkeypatch.setattr(claims, "RENEW_S", 0.05)
    async with pods(api, 1), claiming(root, api) as opened:
        await opened.open(SPEC)
        (name,) = api.claims
        for _ in range(2):
            lifecycle = api.claims[name]["spec"].pop("lifecycle")
            remaining_s = (datetime.fromisoformat(lifecycle["shutdownTime"]) - datetime.now(UTC)).total_seconds()
            assert claims.LEASE_S - 30 < remaining_s <= claims.LEASE_S + 1
            await until(lambda: "lifecycle" in api.claims[name]["spec"])


async def test_several_openings_at_once_share_a_claim(root, api):
    async with pods(api, 2) as cells, claiming(root, api) as opened:
        await opened.prepare(SPEC)
        await asyncio.gather(*(opened.open(SPEC) for _ in range(6)))
        assert len(cells[0]._running) == 6 and len(api.claims) == 1


async def test_full_cell_leads_to_another_claim(root, api):
    """The limits of the cell also count."""
    async with pods(api, 2, sandboxes=1) as cells, claiming(root, api) as opened:
        for _ in range(2):
            await opened.open(SPEC)
        assert [len(cell._running) for cell in cells] == [1, 1]


async def test_claim_without_a_pod_is_an_error_with_its_reason(root, api, monkeypatch):
    monkeypatch.setattr(claims, "READY_S", 0.3)
    monkeypatch.setattr(claims, "POLL_S", 0.05)
    monkeypatch.setattr(ClaimBackend, "reach_s", 4.0)
    async with claiming(root, api) as opened:
        with pytest.raises(SandboxUnavailable, match=r"no pod was ready.*R: no node"):
            await opened.prepare(SPEC)
        await until(lambda: not api.claims and api.deleted)


REPLIES = {
    "forbidden": (403, b'{"message": "cannot create sandboxclaims"}', "status 403 cannot create"),
    "no JSON": (200, b"<html>", "JSONDecodeError"),
    "a list": (200, b"[]", "status 200"),
    "deep": (200, b"[" * 100_000, "Kubernetes API"),
    "endless": (200, b"x" * (2 << 20), "more than 1048576 bytes"),
    "elsewhere": (302, b"{}", "status 302"),
}


@pytest.mark.parametrize("case", REPLIES)
async def test_faults_of_the_api_are_errors(case, root, api, monkeypatch):
    monkeypatch.setattr(ClaimBackend, "reach_s", 3.5)
    status, data, text = REPLIES[case]
    api.answer = lambda method, path: (status, data)
    async with claiming(root, api) as opened:
        with pytest.raises(SandboxUnavailable, match=text):
            await opened.prepare(SPEC)


@pytest.mark.parametrize("address", ["", "evil.example", "169.254.169.254/x", None, ["x"]])
def test_only_an_address_is_taken_from_a_claim(address):
    claim = {"status": {"conditions": [{"type": "Ready", "status": "True"}], "sandbox": {"podIPs": [address]}}}
    assert claims._address(claim) == ""


@pytest.mark.parametrize("status", [None, [], "x", {}, {"conditions": None}, {"conditions": ["x"]}, {"conditions": [{"type": 1}]}])
def test_malformed_status_is_not_ready(status):
    assert claims._address({"status": status}) == "" and claims._reason({"status": status})


def test_options_are_checked(root, api, monkeypatch):
    for options in ({}, {"pool": "p"}, {"pool": "A/../B", "key": KEY, "api": api.url}, {"pool": "p", "key": "short", "api": api.url}):
        with pytest.raises(UserError):
            open_claims(root=root, run_label="t", **options)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UserError, match="not in a pod"):
        open_claims(root=root, run_label="t", pool="p", key=KEY)
    monkeypatch.setenv("CELL_KEY", KEY)
    options = {"pool": "p", "key": "env:CELL_KEY", "api": api.url, "token": "env:CELL_KEY"}
    config = SandboxConfig.model_validate({"backend": {"ref": "agent-sandbox", "options": options}})
    opened = open_backend(config, run_label="t", root=root)
    assert isinstance(opened, ClaimBackend) and KEY not in config.model_dump_json()
    with pytest.raises(SandboxError):
        asyncio.run(opened._api.call("GET", "/nothing"))
