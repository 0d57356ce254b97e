"""Access control of the server (token, Host, Origin), the headers of every response, and limits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.view import RunLibrary, ViewServer
from agentrl.view.server import HEADERS, STATIC_FILES

HERE = "http://127.0.0.1:8420"


@asynccontextmanager
async def client(root: Path, *, token: bool = True, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a view without a network. It has the token unless `token` is false."""
    server = ViewServer(library=RunLibrary(root), port=8420, **options)
    headers = {"authorization": f"Bearer {server.token}"} if token else {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app()), base_url=HERE, headers=headers) as opened:
        opened.view = server  # type: ignore[attr-defined]
        yield opened
    server.library.close()


async def test_every_response_about_a_run_needs_the_token_as_a_header_and_no_cookie_is_set(runs: Path) -> None:
    """Browsers would send a cookie to all ports of the host."""
    async with client(runs, token=False) as api_without_token:
        token = api_without_token.view.token  # type: ignore[attr-defined]
        api_without_token.cookies.set("agentrl_view_8420", token)
        for address in ("/api/runs", f"/api/runs?token={token}", "/api/runs/demo/live"):
            refused = await api_without_token.get(address)
            assert refused.status_code == 401 and "token" in refused.json()["error"]["message"], address
        assert (await api_without_token.get("/api/runs", headers={"authorization": "Bearer wrong"})).status_code == 401
        page = await api_without_token.get(f"/?token={token}")
        assert page.status_code == 200 and "set-cookie" not in page.headers and token not in page.text
        assert (await api_without_token.get("/api/runs", headers={"authorization": f"Bearer {token}"})).status_code == 200


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"host": "127.0.0.1.evil.example:8420"}])
async def test_requests_with_a_public_host_or_origin_are_rejected_even_with_the_token(runs: Path, headers: dict[str, str]) -> None:
    async with client(runs) as api:
        refused = await api.get("/api/runs", headers=headers)
        assert refused.status_code == 403 and "demo" not in refused.text


async def test_every_response_forbids_third_party_scripts_and_content(runs: Path) -> None:
    async with client(runs) as api:
        for address in ("/", "/api/runs", "/api/runs/none", "/nowhere", *(f"/static/{name}" for name in STATIC_FILES)):
            answer = await api.get(address)
            assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, address
        policy = HEADERS["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        page = (await api.get("/")).text
        assert "<script>" not in page and " style=" not in page and " onclick" not in page, "no inline scripts, styles or handlers"


async def test_every_route_works_for_a_run_and_no_response_has_numbers_invalid_in_json(runs: Path) -> None:
    paths = ("", "/ledger", "/curves?key=reward_mean&key=none", "/steps/3", "/groups", "/groups/4", "/groups/4/1", "/groups/4/1/0/1")
    paths += ("/episodes?kind=join&outcome=failed", "/facets", "/failures", "/failures/g000004-0-a0", "/events")
    paths += ("/evaluated/after-heldout-00002-a0", "/episodes?phase=after")
    async with client(runs) as api:
        for path in paths:
            answer = await api.get(f"/api/runs/demo{path}")
            assert answer.status_code == 200, (path, answer.text)
            json.loads(answer.text, parse_constant=pytest.fail)
        compared = (await api.get("/api/compare?run=demo&run=other")).json()
        assert {row["key"]: row["values"] for row in compared["settings"]}["learner.lr"] == ["0.0005", "2e-05"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *(("/steps/99", 404), ("/groups/99", 404), ("/groups/4/9", 404), ("/groups/4/0/0/9", 404), ("/groups/4/0/7/0", 404)),
        *(("/failures/none", 404), ("/evaluated/none", 404), ("/steps/x", 400), ("/groups/9999999999999999999999", 400)),
        *(("/groups/4/-1", 400), ("/groups/4/0/0/0?offset=-5", 400), ("/episodes?min_score=nan", 400), ("/episodes?sort=evil", 422)),
        *(
            ("/episodes?after=%00", 400),
            ("/episodes?after=x", 422),
            ("/curves?" + "key=a&" * 41, 400),
            ("/episodes?text=" + "a" * 500, 400),
        ),
    ],
)
async def test_a_wrong_address_gets_a_message(runs: Path, path: str, status: int) -> None:
    async with client(runs) as api:
        answer = await api.get(f"/api/runs/demo{path}")
        assert answer.status_code == status and answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("run", ["..", "%2e%2e", "demo/..", "~2f657463", "~2e2e", "~", "none", "%00", "demo%2f..%2fdemo"])
async def test_an_id_never_becomes_a_path(runs: Path, run: str) -> None:
    async with client(runs / "demo" / ".." / ".." / runs.name) as api:
        answer = await api.get(f"/api/runs/{run}")
        assert answer.status_code in (404, 200 if run in ("..", "%2e%2e", "demo/..") else 404)
        assert answer.status_code == 404 or "runs" in answer.json(), "httpx removed the dots"


async def test_operations_need_the_origin_of_the_view_and_can_be_disabled(runs: Path) -> None:
    body = {"trace": "g000004-0-a0", "tag": "wrong_unit"}
    for options, headers, status in (
        ({}, {}, 403),
        ({}, {"origin": "http://127.0.0.1:9999"}, 403),
        ({"read_only": True}, {"origin": HERE}, 422),
    ):
        async with client(runs, **options) as api:
            answer = await api.post("/api/runs/demo/operations/tag", json=body, headers=headers)
            assert answer.status_code == status, answer.text
            assert not (runs / "demo" / "operations.jsonl").exists()


async def test_a_single_run_can_be_opened(runs: Path) -> None:
    async with client(runs / "demo") as api:
        listed = (await api.get("/api/runs")).json()
        assert listed["single"] == "demo" and [run["name"] for run in listed["runs"]] == ["demo"]
