"""Capture: what is stored, reading it back, bounds, and damage."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.gate import CaptureConfig
from agentrl.errors import StoreError, UserError
from agentrl.failure import Capture
from agentrl.failure.capture import capture_reason
from agentrl.failure.collection import FILE, Collection, TraceFilter
from agentrl.failure.digest import build_digest
from agentrl.failure.trace import CaptureReason, Tag
from agentrl.records import Blame, EnvironmentSpec, Group, ScoredEpisode
from agentrl.records.environment import RETURN
from agentrl.records.sampling import Supports
from tests.strategies import examples

from .traces import fault, imported_trace, python, scored, submit, task, trace, turn, utterance

STEPS = (turn(python("print(97)", "97")), turn(submit("97")))


def episode(number: int = 0, *, group: int = 0, value: float | None = 0.0, answer: str = "97", **options: object) -> ScoredEpisode:
    return scored(*STEPS, name=f"g{group:06d}-{number}-a0", value=value, answer=answer, **options)  # type: ignore[arg-type]


def group(index: int, *episodes: ScoredEpisode) -> Group:
    return Group(index=index, task_id="t-1", task_key=task().key, episodes=episodes)


def open_capture(folder: Path, **config: object) -> Capture:
    return Capture(folder, CaptureConfig(**config), origin={"run": folder.name})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scored_episode", "reason"),
    [
        (episode(value=1.0), None),
        (episode(value=0.9), CaptureReason.FAILED),
        (episode(value=1.5), None),
        (episode(ended="wall_limit"), CaptureReason.TIMEOUT),
        (episode(ended="tool_timeout"), CaptureReason.TIMEOUT),
        (episode(ended="turn_limit"), CaptureReason.LIMIT),
        (episode(ended="turn_limit", value=1.0), None),
        (episode(value=None), CaptureReason.FAULT),
        (episode(value=float("inf")), CaptureReason.FAULT),
        (episode(failures=(fault(Blame.TASK),)), CaptureReason.FAULT),
        (episode(failures=(fault(Blame.POLICY),)), CaptureReason.FAILED),
    ],
)
def test_reason_for_capturing_an_episode(scored_episode: ScoredEpisode, reason: CaptureReason | None) -> None:
    assert capture_reason(scored_episode, threshold=1.0) is reason


def test_an_audit_or_earlier_success_overrides_the_score() -> None:
    assert capture_reason(episode(value=1.0), threshold=1.0, audit="it copied the file of answers") is CaptureReason.HACKED
    assert capture_reason(episode(ended="turn_limit"), threshold=1.0, passed_before=True) is CaptureReason.REGRESSED
    assert capture_reason(episode(value=0.3), threshold=0.2) is None


def test_capture_uses_the_threshold_of_the_environment(tmp_path: Path) -> None:
    capture = open_capture(tmp_path)
    for number, threshold in enumerate((0.5, 0.6, None)):
        spec = EnvironmentSpec(ref="gymnasium:CartPole-v1", pass_threshold=threshold)
        acting = replace(task(), environment=spec, verifiers=(RETURN,))
        capture.capture_group(acting, group(number, episode(group=number, value=0.5), episode(1, group=number, value=None)), step=0)
    capture.close()
    with Collection(tmp_path) as collection:
        assert [row.id for row in collection.rows() if row.why == "failed"] == ["g000001-0-a0"]
        assert collection.counts("why") == {("",): 2, ("failed",): 1, ("fault",): 3}


def test_a_trace_is_read_back_unchanged(tmp_path: Path) -> None:
    base = trace(*STEPS, of=task("\x1b[31m wide ütf \ufffd", files={"b.txt": "x" * 9000}), answer="97")
    assert base.episode is not None
    sampled = replace(STEPS[0], supports=Supports.from_rows([(3, 9), (4, 8), ()]))
    full = replace(
        base.episode, outputs={"out.bin": bytes(range(256))}, trajectories=(replace(base.episode.trajectories[0], turns=(sampled,)),)
    )
    edited = replace(base, episode=full, tags=(Tag(name="looped", by="rules", note='"by":"person:me"'),), missing=("a",), origin={"é": "ü"})
    imported = replace(imported_trace(utterance("assistant", "I said \ud83d\ude00", call_ids=("c",))), phase="imported")
    with Collection(tmp_path, make=True) as collection:
        assert collection.add([edited, imported]) == 2
    with Collection(tmp_path) as collection:
        assert collection.get(edited.id) == edited and collection.get(imported.id) == imported and collection.get("x") is None
        assert list(collection.traces()) == [edited, imported]
        assert [row.tag for row in collection.rows(TraceFilter(kind="sum"))] == ["looped"]
        assert collection.counts("why") == {("failed",): 1, ("imported",): 1}


def test_all_episodes_of_a_group_are_counted_and_its_failures_stored(tmp_path: Path) -> None:
    capture = open_capture(tmp_path)
    capture.capture_group(task(), group(0, episode(0), episode(1, value=1.0, answer="412"), episode(2, value=None)), step=4)
    broken = replace(episode(3, group=1), episode=replace(episode(3, group=1).episode, failures=(fault(Blame.TASK, "TaskError"),)))
    capture.capture_group(task(), group(1, broken, broken), step=4)
    quarantined = replace(broken, episode=replace(broken.episode, failures=(fault(Blame.TASK, "quarantined"),)))
    capture.capture_group(task(), group(2, quarantined, quarantined), step=4)
    capture.capture_group(None, group(3, broken, broken), step=4)
    capture.close()
    with Collection(tmp_path) as collection:
        assert [(row.id, row.why, row.tag) for row in collection.rows()] == [
            ("g000000-0-a0", "failed", "wrong_answer"),
            ("g000000-2-a0", "fault", "infrastructure"),
            ("g000001-3-a0", "fault", "task_fault"),
        ]
        assert collection.counts("why", "tag") == {
            ("", ""): 1,
            ("failed", "wrong_answer"): 1,
            ("fault", "infrastructure"): 1,
            ("fault", "task_fault"): 2,
        }
        digest = build_digest(collection)
    assert (digest["episodes"], digest["failures"]) == (5, 4)
    assert digest["steps"] == [{"step": 4, "episodes": 5, "tags": {"task_fault": 2, "wrong_answer": 1, "infrastructure": 1}}]
    assert capture.lost == 0


def test_a_resumed_run_continues_and_a_repeated_evaluation_replaces_the_first(tmp_path: Path) -> None:
    first = open_capture(tmp_path)
    first.capture_group(task(), group(0, episode(0)), step=0)
    first.reset_phase("before")
    first.capture_episode(task(), episode(7, value=1.0), phase="before", step=0)
    first.capture_episode(task(), episode(8, of=task(id="other")), phase="before", step=0)
    del first  # killed: nothing was closed
    resumed = open_capture(tmp_path)
    resumed.capture_group(task(), group(1, episode(0, group=1)), step=0)
    resumed.reset_phase("before")
    resumed.capture_episode(task(), episode(7, value=1.0), phase="before", step=0)
    resumed.capture_episode(task(), replace(episode(7), episode=replace(episode(7).episode, id="after-7")), phase="after", step=9)
    resumed.close()
    with Collection(tmp_path) as collection:
        assert [(row.id, row.phase, row.why) for row in collection.rows()] == [
            ("g000000-0-a0", "train", "failed"),
            ("g000001-0-a0", "train", "failed"),
            ("after-7", "after", "regressed"),
        ]
        assert collection.counts("phase") == {("after",): 1, ("before",): 1, ("train",): 2}
        regressed = collection.get("after-7")
    assert regressed is not None and regressed.origin["passed_in"] == "before"


def test_a_repeated_gate_evaluation_replaces_only_its_own_step(tmp_path: Path) -> None:
    capture = open_capture(tmp_path)
    for version, value in ((0, 1.0), (1, 0.0), (1, 0.0)):  # the driver died after the first judgement of version 1
        capture.reset_phase("gate", step=version, place=f"gate{version}")
        for attempt in range(2):
            attempted = episode(value=value)
            renamed = replace(attempted, episode=replace(attempted.episode, id=f"gate{version}-r{attempt}"))
            capture.capture_episode(task(), renamed, phase="gate", step=version, place=f"gate{version}")
    capture.close()
    with Collection(tmp_path) as collection:
        assert [(row.id, row.why) for row in collection.rows()] == [("gate1-r0", "regressed"), ("gate1-r1", "regressed")]
        assert collection.counts("step", "why") == {(0, ""): 2, (1, "regressed"): 2}


def test_frequent_failures_are_deleted_before_rare_or_tagged_ones(tmp_path: Path) -> None:
    rare = replace(trace(*STEPS, name="rare"), tags=(Tag(name="looped", by="rules"),))
    common = [replace(trace(*STEPS, name=f"c{n:03d}", of=task(id=f"t{n}")), tags=(Tag(name="budget", by="rules"),)) for n in range(30)]
    with Collection(tmp_path, keep=5, make=True) as collection:
        collection.add([rare, *common[:2]])
        collection.tag("c001", (Tag(name="budget", by="person:me"),))
        for frequent in common[2:]:
            collection.add([frequent])
        assert [row.id for row in collection.rows()] == ["rare", "c001", "c027", "c028", "c029"]
        assert collection.dropped() == {"train": 26} and collection.counts("tag") == {("budget",): 30, ("looped",): 1}
    tasks = sqlite3.connect(tmp_path / FILE).execute("SELECT COUNT(*) FROM tasks").fetchone()
    assert tasks == (5,), "a task is deleted with its last trace"
    with Collection(tmp_path, keep=5, make=True) as collection:
        collection.add([replace(rare, id="more")])
        assert len(collection) == 5, "the limit applies after a restart"


def test_limits_hold_in_a_phase_that_another_process_started(tmp_path: Path) -> None:
    traces = [replace(trace(*STEPS, answer="97"), id=f"t{number}", phase="train") for number in range(5)]
    for change in ("add", "replace", "tag"):
        folder = tmp_path / change
        with Collection(folder, keep=2, make=True) as first, Collection(folder, keep=2, make=True) as second:
            assert second.add(traces[:2]) == 2
            if change == "replace":
                first.add(traces[:1])
            elif change == "tag":
                first.tag("t0", (Tag(name="looped", by="rules"),))
            first.add(traces[2:4])
            assert len(first) == 2 and first._size_of("train").tags.total() == 2
            assert first._size_of("train").bytes == sum(row.bytes for row in first.rows())


def test_limits_apply_to_a_phase_that_another_process_has_changed(tmp_path: Path) -> None:
    """Each process counts the traces of a phase, and recounts them after another process has changed the collection."""
    traces = [replace(trace(*STEPS, answer="97"), id=f"t{number}", tags=(Tag(name="budget", by="rules"),)) for number in range(5)]
    with Collection(tmp_path, keep=2, make=True) as first, Collection(tmp_path, keep=2) as second:
        first.add(traces[:2])
        second.clear_phase(traces[0].phase)
        assert first.add(traces[2:4]) == 2 and [row.id for row in first.rows()] == ["t2", "t3"] and not first.dropped()
        second.tag("t3", (Tag(name="looped", by="rules"),))
        second.tag("t2", (Tag(name="looped", by="rules"),))
        first.add(traces[4:])
        assert [row.id for row in first.rows()] == ["t3", "t4"], "the oldest trace with the most frequent tag is deleted"


def test_an_unknown_trace_is_the_users_error(tmp_path: Path) -> None:
    with Collection(tmp_path, make=True) as collection, pytest.raises(UserError, match="has no trace x") as error:
        collection.tag("x", (Tag(name="looped", by="rules"),))
    assert "failures list" in error.value.fix


def test_bytes_are_bounded_and_a_huge_trace_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Collection(tmp_path, keep_bytes=4000, make=True) as collection:
        for number in range(40):
            collection.add([trace(*STEPS, name=f"n{number}", of=task(id=f"t{number}"))])
        assert 1 <= len(collection) < 40 and sum(row.bytes for row in collection.rows()) <= 4000
        monkeypatch.setattr("agentrl.failure.collection.MAX_TRACE_BYTES", 100)
        assert collection.add([trace(*STEPS, name="huge")]) == 0
        assert collection.get("huge") is None


def test_a_truncated_file_loses_its_traces_and_does_not_stop_the_run(tmp_path: Path) -> None:
    capture = open_capture(tmp_path)
    for index in range(12):
        capture.capture_group(task(), group(index, *(episode(n, group=index) for n in range(3))), step=0)
    capture.close()
    content = (tmp_path / FILE).read_bytes()
    for size in (0, 1, 100, 5000, len(content) // 2, len(content) - 1):
        folder = tmp_path / f"cut{size}"
        (folder / FILE).parent.mkdir(parents=True)
        (folder / FILE).write_bytes(content[:size])
        reopened = open_capture(folder)
        reopened.reset_phase("before")
        for index in (20, 21):
            reopened.capture_group(task(), group(index, episode(0, group=index)), step=1)
        reopened.close()
        assert reopened.lost == 0, size
        with Collection(folder) as collection:
            ids = [row.id for row in collection.rows()]
        assert {"g000020-0-a0", "g000021-0-a0"} <= set(ids), size


def test_the_error_for_a_damaged_trace_has_its_id(tmp_path: Path) -> None:
    with Collection(tmp_path, make=True) as collection:
        collection.add([trace(*STEPS)])
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("UPDATE traces SET body = ?", (b"\x28\xb5\x2f\xfd garbage",))
    db.commit()
    db.close()
    with Collection(tmp_path) as collection, pytest.raises(StoreError, match=r"trace g000000-0-a0 .* is damaged"):
        collection.get("g000000-0-a0")


def test_a_missing_or_foreign_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no captured failures"):
        Collection(tmp_path)
    (tmp_path / FILE).parent.mkdir()
    sqlite3.connect(tmp_path / FILE).execute("CREATE TABLE t (x)").connection.commit()
    with pytest.raises(StoreError, match="not a collection of traces"):
        Collection(tmp_path)


def test_a_full_disk_loses_the_trace_and_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "failures").write_text("no folder")
    capture = open_capture(tmp_path)
    capture.capture_group(task(), group(0, episode(0)), step=0)
    assert capture.lost == 1


@settings(max_examples=examples(25))
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=24), st.integers(1, 6))
def test_counts_include_traces_that_are_not_stored(
    tmp_path_factory: pytest.TempPathFactory, failures: list[tuple[str, bool]], keep: int
) -> None:
    folder = tmp_path_factory.mktemp("c")
    with Collection(folder, keep=keep, make=True) as collection:
        for number, (tag, retag) in enumerate(failures):
            name = f"n{number}"
            collection.add([replace(trace(*STEPS[:1], name=name), tags=(Tag(name=tag, by="rules"),))])
            if retag:
                collection.tag(name, (Tag(name="z", by="rules"),))
        assert sum(collection.counts("tag").values()) == len(failures)
        assert len(collection) == min(keep, len(failures)) == len(failures) - sum(collection.dropped().values())
        stored_tags = [row.tag for row in collection.rows()]
        assert all(collection.counts("tag")[(tag,)] >= stored_tags.count(tag) for tag in set(stored_tags))


def test_a_locked_file_delays_the_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("agentrl.failure.capture._BUSY_S", 0.3)
    open_capture(tmp_path).capture_group(task(), group(0, episode(0)), step=0)
    capture, other = open_capture(tmp_path), sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    for index in range(1, 11):
        capture.capture_group(task(), group(index, episode(0, group=index), episode(1, group=index)), step=0)
    assert time.monotonic() - began < 2.7 and capture.lost == 20  # ten delays take 3 s
    other.execute("ROLLBACK")
    monkeypatch.setattr("agentrl.failure.capture.time", SimpleNamespace(monotonic=lambda: began + 60, thread_time=time.thread_time))
    capture.capture_group(task(), group(11, episode(0, group=11)), step=0)
    capture.close()
    assert "20 episodes are missing from the captured failures" in caplog.text
    with Collection(tmp_path) as collection:
        assert [row.id for row in collection.rows()] == ["g000000-0-a0", "g000011-0-a0"]


def test_the_traces_of_a_read_only_run_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Collection(tmp_path, make=True) as collection:
        collection.add([trace(*STEPS)])
    monkeypatch.setattr("agentrl.base.database.os.access", lambda path, mode: False)  # an archive that is mounted read-only
    with Collection(tmp_path) as collection:
        assert len(collection) == 1 and [path.name for path in (tmp_path / "failures").iterdir()] == ["traces.sqlite"]
        with pytest.raises(StoreError, match="readonly"):
            collection.clear_phase("train")
