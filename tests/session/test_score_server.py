"""Late scores over HTTP: a real server and store with parked groups, and senders that fail, race, hang and crash."""

from __future__ import annotations

import asyncio
import gzip
import html
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.errors import StoreError, UserError
from agentrl.experience import SqliteStore
from agentrl.gateway.http_server import HttpServer
from agentrl.records import GroupUse, LateScore, ScoreReceipt
from agentrl.session import score_server
from agentrl.session.score_server import ScoreServer, run_token
from agentrl.session.transcript import PendingTranscripts
from tests.forking import FORKS
from tests.late import HOSTILE, REVIEW, late_group, late_task, opened_store, write_run

PAST = replace(REVIEW, name="past", expires_at=1.0)
SCORE = {"episode_id": "g0-0", "part": "review", "value": 0.5, "scored_by": "anna", "key": "k1"}


@asynccontextmanager
async def served(run: Path, store: SqliteStore, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the token of a server on loopback."""
    token = run_token(run)
    server = HttpServer(app=ScoreServer(store=store, run_dir=run, token=token, **options).app(), name="score server", host="127.0.0.1")
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
            yield client
    finally:
        await server.stop()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    run = write_run(tmp_path / "run", late_group(0), late_group(1, PAST, replace(REVIEW, name="style", low=-1.0)))
    with opened_store(run) as store:
        async with served(run, store) as client:
            yield client


async def test_the_scores_of_a_group_make_it_ready_and_a_retry_gets_the_receipt(client: httpx.AsyncClient, tmp_path: Path) -> None:
    first = await client.post("/scores", json=SCORE)
    assert (first.status_code, first.json()) == (200, {"group": 0, "attempt": 0, "remaining": 1, "repeated": False, "replaced": None})
    retry = await client.post("/scores", json=SCORE)
    assert (retry.status_code, retry.json()) == (200, {**first.json(), "repeated": True})
    with opened_store(tmp_path / "run") as store:
        assert [entry.state for entry in store.entries()] == ["parked", "parked"]
        without_key = {name: value for name, value in SCORE.items() if name != "key"} | {"episode_id": "g0-1", "value": 1}
        assert [(await client.post("/scores", json=without_key)).json()["repeated"] for _ in range(2)] == [False, True]
        assert store.entries()[0].state == "ready"
        assert [scored.score.value for scored in store.groups([0])[0].episodes] == [0.5, 1.0]


REJECTED = {
    "unknown episode": ({"episode_id": "missing"}, 404, "unknown"),
    "unknown part": ({"part": "nothing"}, 404, "unknown"),
    "expired": ({"episode_id": "g1-0", "part": "past"}, 410, "expired"),
    "too high": ({"value": 1.0001}, 422, "out_of_range"),
    "too low": ({"value": -5e-324}, 422, "out_of_range"),
    "NaN": ({"value": float("nan")}, 400, "not_finite"),
    "infinite": ({"value": float("-inf")}, 400, "not_finite"),
    "an integer beyond all floats": ({"value": 10**400}, 400, "not_finite"),
    "true": ({"value": True}, 400, "malformed"),
    "text": ({"value": "0.5"}, 400, "malformed"),
    "no part": ({"part": None}, 400, "malformed"),
    "a number as a name": ({"part": 3}, 400, "malformed"),
    "an empty name": ({"scored_by": ""}, 400, "malformed"),
    "a long key": ({"key": "k" * 201}, 400, "malformed"),
    "half of a character": ({"key": "\ud800"}, 400, "malformed"),
    "text for a switch": ({"replace": "yes"}, 400, "malformed"),
    "an unknown field": ({"weight": 2}, 400, "malformed"),
}


@pytest.mark.parametrize("case", REJECTED)
async def test_a_rejected_score_has_a_cause_and_changes_nothing(case: str, client: httpx.AsyncClient, tmp_path: Path) -> None:
    change, status, cause = REJECTED[case]
    answer = await client.post("/scores", content=json.dumps({**SCORE, **change}))
    error = answer.json()["error"]
    assert (answer.status_code, error["cause"]) == (status, cause) and error["message"] and error["fix"], answer.text
    assert str(tmp_path) not in answer.text and "Traceback" not in answer.text
    with opened_store(tmp_path / "run") as store:
        assert {entry.pending for entry in store.entries()} == {2, 4}
    assert (await client.post("/scores", json=SCORE)).status_code == 200, "the key of a rejected score is free"


async def test_a_second_value_of_a_part_is_contradictory_and_after_training_finished(client: httpx.AsyncClient, tmp_path: Path) -> None:
    await client.post("/scores", json={"scores": [SCORE, {**SCORE, "episode_id": "g0-1", "key": "k2"}]})
    other = {**SCORE, "value": 0.25}
    for changed in (other, {**other, "key": "other"}):
        answer = await client.post("/scores", json=changed)
        assert (answer.status_code, answer.json()["error"]["cause"]) == (409, "contradictory"), answer.text
    replacement = {**other, "key": "other", "replace": True}
    assert (await client.post("/scores", json=replacement)).json()["error"]["cause"] == "finished", "its group has all scores"
    with opened_store(tmp_path / "run") as store:
        store.commit(0, {0: GroupUse(tokens_trained=1)}, "checkpoints/000001")
    answer = await client.post("/scores", json={**other, "key": "later"})
    assert (answer.status_code, answer.json()["error"]["cause"]) == (409, "finished"), answer.text
    assert (await client.post("/scores", json=SCORE)).json()["repeated"], "the sender of the first value gets its receipt"


async def test_each_item_of_a_list_has_its_result(client: httpx.AsyncClient) -> None:
    scores = [SCORE, {**SCORE, "value": 2}, 7, {**SCORE, "episode_id": "g0-1", "key": "k2"}]
    answer = await client.post("/scores", json={"scores": scores})
    causes = [result.get("error", {}).get("cause") for result in answer.json()["results"]]
    assert (answer.status_code, causes[0], causes[2:]) == (422, None, ["malformed", None])
    assert causes[1] in ("contradictory", "out_of_range") and answer.json()["results"][3]["remaining"] == 0
    assert (await client.post("/scores", json={"scores": [scores[0], scores[3]]})).status_code == 200
    assert (await client.post("/scores", json={"scores": [SCORE] * 101})).status_code == 400


async def test_one_of_several_racing_senders_wins_and_the_others_get_an_error(client: httpx.AsyncClient, tmp_path: Path) -> None:
    with opened_store(tmp_path / "run") as other_process:

        async def send(number: int) -> bool:
            score = LateScore(episode_id="g0-0", part="review", value=number / 20, scored_by=f"s{number}", key=f"k{number}")
            if number % 2:
                return (await client.post("/scores", json={name: getattr(score, name) for name in SCORE})).status_code == 200
            try:
                return not (await asyncio.to_thread(other_process.add_score, score, now=10.0)).repeated
            except UserError as error:
                assert getattr(error, "cause", "") == "contradictory"
                return False

        won = await asyncio.gather(*map(send, range(20)))
        assert sum(won) == 1
        assert other_process.groups([0])[0].episodes[0].score.value == pytest.approx(won.index(True) / 20)


class DyingStore(SqliteStore):
    """A store whose process dies after the commit of a score, before the answer."""

    def add_score(self, score: LateScore, *, now: float) -> ScoreReceipt:
        super().add_score(score, now=now)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def _serve_and_die(run: str, address: Any) -> None:
    async def serve() -> None:
        store = DyingStore(Path(run) / "experience.sqlite")
        server = ScoreServer(store=store, run_dir=Path(run), token=run_token(Path(run)))
        http = HttpServer(app=server.app(), name="score server", host="127.0.0.1")
        await http.start()
        address.put(http.url)
        await http.wait()

    asyncio.run(serve())


@pytest.mark.slow
async def test_a_resent_score_whose_answer_was_lost_gets_its_receipt(tmp_path: Path) -> None:
    run, address = write_run(tmp_path / "run", late_group(0)), FORKS.Queue()
    process = FORKS.Process(target=_serve_and_die, args=(str(run), address))
    process.start()
    url = await asyncio.to_thread(address.get, timeout=300)
    headers = {"Authorization": f"Bearer {run_token(run)}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        with pytest.raises(httpx.TransportError):
            await client.post("/scores", json=SCORE)
    await asyncio.to_thread(process.join, 300)
    assert process.exitcode == -signal.SIGKILL
    with opened_store(run) as store:
        async with served(run, store) as client:
            assert (await client.post("/scores", json=SCORE)).json() == {
                "group": 0,
                "attempt": 0,
                "remaining": 1,
                "repeated": True,
                "replaced": None,
            }


async def test_pending_scores_are_paginated(client: httpx.AsyncClient) -> None:
    items, after = [], ""
    while page := (await client.get("/pending", params={"limit": 1, "after": after})).json()["pending"]:
        assert len({item["episode_id"] for item in page}) == 1
        items += [(item["episode_id"], item["part"], item["low"], item["left_s"]) for item in page]
        after = page[-1]["episode_id"]
    assert [item for item in items if item[0].startswith("g0")] == [(f"g0-{n}", "review", 0.0, None) for n in range(2)]
    assert {item[0] for item in items if item[1] == "style"} <= {"g1-0", "g1-1"} and len(items) == len(set(items))
    for limit in ("0", "101", "x", "-1", "٣", "00000000199"):
        assert (await client.get("/pending", params={"limit": limit})).status_code == 400


async def test_every_route_needs_the_token_and_a_local_host_header(client: httpx.AsyncClient, tmp_path: Path) -> None:
    token = run_token(tmp_path / "run")
    for key in ("", "Bearer", f"Bearer {token[:-1]}", f"Bearer {token}x", f"Basic {token}", "Bearer \xff"):
        for method, path in (("POST", "/scores"), ("GET", "/pending"), ("POST", "/episode")):
            answer = await client.request(method, path, headers={"Authorization": key.encode("latin-1")}, json=SCORE)
            assert (answer.status_code, answer.json()["error"]["cause"]) == (401, "wrong_key"), key
    for header in ("Host", "Origin"):
        answer = await client.post("/scores", json=SCORE, headers={header: "http://evil.example" if header == "Origin" else "evil.example"})
        assert answer.status_code == 403
    assert (await client.options("/scores", headers={"Origin": "http://a"})).status_code == 404, "no other origin may send requests"
    assert (await client.get("/scores")).status_code == 404 and (await client.get("/../../etc/passwd")).status_code == 404


async def test_bodies_are_bounded_in_bytes_depth_and_time(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = gzip.compress(b" " * (score_server.MAX_BODY + 1))
    assert (await client.post("/scores", content=b" " * (score_server.MAX_BODY + 1))).status_code == 413
    assert (await client.post("/scores", content=bomb, headers={"Content-Encoding": "gzip"})).status_code == 413
    for content in (b"", b"{", b"[" * 100_000, b"\xff", b"1" * 5000, b'{"scores": 1}', b'{"scores": [], "x": 1}'):
        answer = await client.post("/scores", content=content)
        assert answer.status_code == 400 and answer.json()["error"]["cause"] in ("malformed", "invalid", "unknown_field"), answer.text
    monkeypatch.setattr(score_server, "BODY_S", 0.05)

    async def drip() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(0.3)
        yield b"}"

    assert (await client.post("/scores", content=drip())).status_code == 400


async def test_a_store_error_is_no_rejection_and_reveals_nothing_of_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SqliteStore):
        def add_score(self, score: LateScore, *, now: float) -> ScoreReceipt:
            raise StoreError(f"experience store {self.path}: the disk is full")

    run = write_run(tmp_path / "run", late_group(0))
    store = Broken(run / "experience.sqlite")
    async with served(run, store) as client:
        answer = await client.post("/scores", json=SCORE)
        assert (answer.status_code, answer.json()["error"]["cause"]) == (503, "failed")
        assert str(tmp_path) not in answer.text and "disk" not in answer.text and "disk is full" in caplog.text
    store.close()


async def test_requests_beyond_the_limit_get_status_429(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", late_group(0))
    monkeypatch.setattr(score_server, "WAITING", 2)
    with opened_store(run) as store:
        async with served(run, store) as client:
            with store._lock:  # as if another process held the database
                waiting = [asyncio.create_task(client.get("/pending")) for _ in range(6)]
                done, _ = await asyncio.wait(waiting, timeout=60, return_when=asyncio.FIRST_COMPLETED)
                while len(done) < 4:
                    done, _ = await asyncio.wait(waiting, timeout=0.05)
                assert {task.result().status_code for task in done} == {429}
            assert sorted(task.result().status_code for task in (await asyncio.wait(waiting))[0]) == [200] * 2 + [429] * 4


def test_the_token_file_is_private_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / score_server.TOKEN_FILE
    before = os.umask(0)
    try:
        token = run_token(tmp_path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600 and run_token(tmp_path) == token and [*tmp_path.iterdir()] == [path]
    path.chmod(0o644)
    with pytest.raises(UserError, match="other users can read it"):
        run_token(tmp_path)
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(UserError, match="outside"):
        run_token(tmp_path)


async def test_the_page_shows_one_episode_and_escapes_all_text(tmp_path: Path) -> None:
    group = late_group(0, replace(REVIEW, name=HOSTILE))
    run = write_run(tmp_path / "run", group, question=HOSTILE)
    with opened_store(run) as store:
        async with served(run, store, user="anna") as client:
            shell = await client.get("/", headers={"Authorization": ""})
            assert shell.status_code == 200 and "<script src=" in shell.text
            policy = shell.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
            for file in re.findall(r'(?:src|href)="([^"]*)"', shell.text):
                assert file.startswith("/") and (await client.get(file)).status_code == 200
            page = await client.post("/episode", json={"skipped": [], "scored_by": "anna"})
            assert page.headers["content-security-policy"] == policy and page.headers["cache-control"] == "no-store"
            assert "<script" not in page.text and "<img" not in page.text and "\u202e" not in page.text
            assert page.text.count("&lt;script&gt;document.title") >= 4, "question, message, tool output and answer"
            match = re.search(r'data-target="([^"]*)"', page.text)
            assert match is not None
            target = json.loads(html.unescape(match[1]))
            assert target["part"] == HOSTILE and (target["low"], target["high"]) == (0.0, 1.0)
            score = {"episode_id": target["episode_id"], "part": target["part"], "value": 1, "scored_by": "anna"}
            assert (await client.post("/scores", json=score)).json()["remaining"] == 1
            rest = await client.post("/episode", json={"skipped": [target["episode_id"]]})
            assert "g0-" in rest.text and target["episode_id"] not in rest.text
            empty = await client.post("/episode", json={"skipped": ["g0-0", "g0-1"]})
            assert "Nothing to score now, except for 2 skipped episodes" in empty.text and "<article" not in empty.text


async def test_a_blind_page_hides_the_reference_and_a_missing_transcript_is_no_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", late_group(0, size=1, answer="97"))
    with opened_store(run) as store:
        for blind in (False, True):
            async with served(run, store, blind=blind) as client:
                page = (await client.post("/episode", json={})).text
                assert ("<dd>412</dd>" in page) is not blind and "<dd>97</dd>" in page and "How many?" in page
        (run / "pending" / "000000.json").write_text("{")
        async with served(run, store) as client:
            assert "t0" in (await client.post("/episode", json={})).text


async def test_different_users_get_different_episodes_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", late_group(0, size=32))
    with opened_store(run) as store:
        async with served(run, store) as client:
            first = [(await client.post("/episode", json={"scored_by": f"person {number}"})).text for number in range(4)]
            assert len(set(first)) > 1
            assert (await client.post("/episode", json={"scored_by": "person 0"})).text == first[0]


def test_the_task_of_a_pending_group_is_read_from_its_file_unless_damaged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", late_group(0), late_group(1))
    transcripts = PendingTranscripts(run)
    content = transcripts.read(1, 0)
    assert content is not None and content["question"] == "How many?" and content["answer"] == HOSTILE
    assert transcripts.groups() == {0, 1} and transcripts.task(1) == late_task(1)
    (run / "pending" / "000001.json").write_text('{"task": "{}"}')
    transcripts.remove(0)
    transcripts.remove(0)
    assert transcripts.groups() == {1} and transcripts.task(1) is transcripts.task(0) is transcripts.read(0, 0) is None
