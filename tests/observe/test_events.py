"""The stream of events: recorded events are read back once and in order, whatever else is in the files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
import typing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.observe import event_log
from agentrl.observe.event_log import FOLDER, EventLog, newest_offset, read_events
from agentrl.observe.events import KINDS, MAX_LINE, AlertRaised, Event, EventsDropped, StageStarted, ToolEnded, TurnEnded, decode, encode

finite = st.floats(allow_nan=False, allow_infinity=False)
short = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(-(1 << 62), 1 << 62)
VALUES = {"Number": finite, "Count": counts, "str": short, "bool": st.booleans()}
VALUES |= {f"{name} | None": st.none() | values for name, values in VALUES.items()}
VALUES |= {"tuple[str, ...]": st.lists(short, max_size=3).map(tuple)}
VALUES |= {"tuple[Number | None, ...]": st.lists(st.none() | finite, max_size=3).map(tuple)}
VALUES |= {"Mapping[str, Number | None]": st.dictionaries(short, st.none() | finite, max_size=3)}
rates = st.tuples(finite, finite, finite, counts)
VALUES |= {"Mapping[str, tuple[Number, Number, Number, Count]]": st.dictionaries(short, rates, max_size=3)}
events = st.sampled_from(list(KINDS.values())).flatmap(
    lambda kind: st.builds(kind, **{field.name: VALUES[str(field.type)] for field in fields(kind)})
)


def test_a_second_writer_waits_until_the_first_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would write to the same offsets. The events of the second are not lost, and one message explains the delay."""
    monkeypatch.setattr(event_log, "_FLUSH_S", 0.01)
    faults: list[str] = []
    first = EventLog(tmp_path)
    first.record(StageStarted(stage="first", detail=""))
    deadline = time.monotonic() + 10
    while not read_events(tmp_path).events:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = EventLog(tmp_path, on_fault=faults.append)
    second.record(StageStarted(stage="second", detail=""))
    while not faults:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "another process is recording events of this run" in faults[0]
    first.record(StageStarted(stage="more", detail=""))
    first.close()
    second.close()
    assert [getattr(event, "stage", "") for event in read_events(tmp_path).events if isinstance(event, StageStarted)] == [
        "first",
        "more",
        "second",
    ]


@pytest.mark.parametrize("error", [errno.EBADF, errno.ENOLCK])
def test_events_are_recorded_on_nfs_and_the_error_of_a_lock_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """NFS locks only files that are open for writing (flock(2)), never folders. Some file systems do not support locks."""

    def flock(handle: int, operation: int) -> None:
        if error == errno.ENOLCK or not fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_RDWR:
            raise OSError(error, os.strerror(error))
        lock(handle, operation)

    lock, faults = fcntl.flock, list[str]()
    monkeypatch.setattr(fcntl, "flock", flock)
    log = EventLog(tmp_path, on_fault=faults.append)
    log.record(alerts(1)[0])
    log.close()
    if error == errno.EBADF:
        assert read_all(tmp_path)[0] == alerts(1) and not faults
    else:
        assert len(faults) == 1 and "No locks available" in faults[0]


@pytest.mark.slow
def test_the_lock_of_a_killed_driver_is_free_while_its_children_run(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time; from pathlib import Path; from agentrl.observe.event_log import EventLog\n"
        "from agentrl.observe.events import AlertRaised\n"
        "log = EventLog(Path(sys.argv[1])); log.record(AlertRaised(text='first'))\n"
        "time.sleep(1); child = subprocess.Popen(['sleep', '100'], close_fds=False, stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        child = int(driver.stdout.readline())
        driver.kill()
    try:
        faults = list[str]()
        log = EventLog(tmp_path, on_fault=faults.append)
        log.record(alerts(1)[0])
        log.close()
        assert not faults and next(getattr(event, "text", "") for event in read_all(tmp_path)[0]) == "first"
    finally:
        os.kill(child, signal.SIGKILL)


@given(events)
def test_an_event_is_read_back_equal(event: Event) -> None:
    line = encode(event)
    assert decode(line) == event and line.count(b"\n") == 1


@given(st.text(max_size=5), st.integers(0, 3000), st.lists(st.text(), max_size=3), st.floats())
def test_any_text_and_number_fits_into_a_line(text: str, times: int, names: list[str], seconds: float) -> None:
    turn = TurnEnded(
        at=1.0,
        episode=text * times,
        trajectory=0,
        turn=0,
        agent=text * times,
        prompt_tokens=1,
        sampled_tokens=1,
        version=None,
        seconds=seconds,
        finish_reason="stop",
        text=text * times,
        calls=tuple(names * times),
    )
    line = encode(turn)
    assert len(line) <= MAX_LINE and json.loads(line)["event"] == "turn"
    if seconds == seconds and abs(seconds) != float("inf"):
        assert typing.cast(Any, decode(line)).seconds == seconds


def alerts(count: int, start: int = 0) -> list[Event]:
    return [AlertRaised(at=float(number), text=f"alert {number}") for number in range(start, start + count)]


def record(run_dir: Path, recorded: list[Event], **limits: Any) -> None:
    log = EventLog(run_dir, **limits)
    for event in recorded:
        log.record(event)
    log.close()


def read_all(run_dir: Path, *, after: int = 0, limit: int = 100) -> tuple[list[Event], int, int, int]:
    """Returns all events, the last offset, and the numbers of skipped lines and missed bytes."""
    collected, skipped, missed = list[Event](), 0, 0
    while True:
        page = read_events(run_dir, after=after, limit=limit)
        skipped, missed = skipped + page.skipped, missed + page.missed
        if page.offset == after and not page.events:
            return collected, after, skipped, missed
        assert page.offset > after
        collected, after = [*collected, *page.events], page.offset


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_pages_of_any_size_have_all_events_once_and_in_order(tmp_path: Path, limit: int) -> None:
    record(tmp_path, alerts(300), segment_bytes=2000, segments=100)
    assert len(list((tmp_path / FOLDER).glob("*.jsonl"))) > 5
    assert read_all(tmp_path, limit=limit) == (alerts(300), newest_offset(tmp_path, back=0), 0, 0)


def test_a_run_without_events_has_an_empty_page(tmp_path: Path) -> None:
    assert read_events(tmp_path, after=7) == event_log.EventPage(events=(), offset=0) and newest_offset(tmp_path) == 0


def test_a_resumed_run_continues_after_the_last_complete_line(tmp_path: Path) -> None:
    record(tmp_path, alerts(3))
    first, offset, _, _ = read_all(tmp_path)
    segment = tmp_path / FOLDER / f"{0:015d}.jsonl"
    with segment.open("ab") as file:
        file.write(encode(alerts(1)[0])[:-9])  # the driver was killed while it wrote
    assert first == alerts(3) and read_events(tmp_path, after=offset).offset == offset, "a half-written line is not an event"
    record(tmp_path, alerts(2, start=3))
    assert read_all(tmp_path, after=offset)[0] == alerts(2, start=3) and read_all(tmp_path)[0] == alerts(5)


def test_only_the_newest_segments_are_kept_and_deleted_bytes_are_reported(tmp_path: Path) -> None:
    record(tmp_path, alerts(1000), segment_bytes=4000, segments=3)
    names = sorted(path.name for path in (tmp_path / FOLDER).glob("*.jsonl"))
    read, _, skipped, missed = read_all(tmp_path)
    assert len(names) == 3 and missed == int(names[0][:15]) > 0 and skipped == 0
    assert read == alerts(1000)[-len(read) :]
    tail = read_events(tmp_path, after=newest_offset(tmp_path, back=1000))
    assert tail.events == tuple(alerts(1000)[-len(tail.events) :]) and 5 < len(tail.events) < 25 and tail.skipped == 0


def test_invalid_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    record(tmp_path, alerts(2))
    bad = [b"", b"{", b"null", b"[1]", b'{"event": 3}', b'{"event": "later", "x": 1}', b'{"event": "alert"}', b"\xff\xfe", b"[" * 9000]
    bad += [b'{"event": "alert", "at": NaN, "text": "x"}', b'{"event": "group", "group": 1e400}', b'{"event": "alert", "at": 1, "text": 5}']
    bad += [b'{"event": "alert", "at": %s, "text": ""}' % (b"9" * 5000), b"x" * (3 * MAX_LINE), b'{"event": "alert", "text": "\\ud800"}']
    with (tmp_path / FOLDER / f"{0:015d}.jsonl").open("ab") as file:
        file.writelines(line + b"\n" for line in bad)
    record(tmp_path, alerts(2, start=2))
    read, _, skipped, _ = read_all(tmp_path)
    assert read == alerts(4) and skipped == len(bad)


def test_files_that_agentrl_does_not_write_are_harmless(tmp_path: Path) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret"
    record(run, alerts(2))
    for name in ("x.jsonl", "000000000000001.jsonl.part", "-00000000000001.jsonl", "00000000000000a.jsonl"):
        (run / FOLDER / name).write_text("x\n")
    assert read_all(run)[0] == alerts(2)
    secret.write_bytes(encode(AlertRaised(text="secret")))
    (run / FOLDER / f"{10**14:015d}.jsonl").symlink_to(secret)
    with pytest.raises(ValueError, match="outside"):
        read_events(run, after=10**14)
    (run / FOLDER / f"{10**14:015d}.jsonl").unlink()
    os.mkfifo(run / FOLDER / f"{10**14:015d}.jsonl")
    with pytest.raises(ValueError, match="regular"):
        read_events(run, after=10**14)


def test_segments_that_overlap_or_leave_gaps_are_read_once(tmp_path: Path) -> None:
    """A reader always advances, whatever the file names are."""
    folder = tmp_path / FOLDER
    folder.mkdir()
    for start in (0, 50, 51, 10_000, (10**15) - 1):
        (folder / f"{start:015d}.jsonl").write_bytes(b"".join(map(encode, alerts(20))))
    read, offset, _, missed = read_all(tmp_path, limit=3)
    assert 40 <= len(read) <= 100 and offset > 10**15 and missed > 10**14


def test_events_that_are_faster_than_the_disk_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_FLUSH_S", 60.0)
    log = EventLog(tmp_path, max_waiting=10)
    started = time.monotonic()
    for event in alerts(25):
        log.record(event)
    assert time.monotonic() - started < 1.0
    log.close()
    read = read_all(tmp_path)[0]
    assert [replace(read[0], at=0.0), *read[1:]] == [EventsDropped(at=0.0, count=15), *alerts(10)]


def test_a_failing_disk_is_reported_once_and_raises_nothing_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_FLUSH_S", 0.01)
    monkeypatch.setattr(event_log, "_RETRY_S", 0.05)
    faults = list[str]()
    blocked = tmp_path / FOLDER
    blocked.write_text("a file where the folder should be")
    log = EventLog(tmp_path, on_fault=faults.append)
    for event in alerts(5):
        log.record(event)
    deadline = time.monotonic() + 20
    while not faults and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # time for several retries
    assert len(faults) == 1 and "events are not recorded" in faults[0]
    blocked.unlink()
    log.record(alerts(1, start=5)[0])
    log.close()
    read = read_all(tmp_path)[0]
    dropped = sum(event.count for event in read if isinstance(event, EventsDropped))
    assert dropped + sum(isinstance(event, AlertRaised) for event in read) == 6 and read[-1] == alerts(1, start=5)[0]


def test_a_partially_written_line_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk writes part of the bytes; later events follow the last complete line."""

    class Full(event_log.FileIO):
        full = True

        def write(self, content: Any) -> int:
            if Full.full:
                Full.full = False
                return super().write(content[: len(content) // 2])
            return super().write(content)

    record(tmp_path, alerts(2))
    monkeypatch.setattr(event_log, "FileIO", Full)
    faults = list[str]()
    log = EventLog(tmp_path, on_fault=faults.append)
    for event in alerts(3, start=2):
        log.record(event)
    deadline = time.monotonic() + 20
    while not faults and time.monotonic() < deadline:
        time.sleep(0.01)
    log.record(alerts(1, start=5)[0])
    log.close()
    read, _, skipped, _ = read_all(tmp_path)
    assert [replace(event, at=0.0) for event in read] == [
        *(replace(event, at=0.0) for event in alerts(2)),
        EventsDropped(at=0.0, count=3),
        replace(alerts(1, start=5)[0], at=0.0),
    ]
    assert skipped == 0 and len(faults) == 1


def test_long_texts_of_a_tool_call_are_truncated() -> None:
    call = ToolEnded(
        at=1.0, episode="e", trajectory=0, turn=0, call=0, tool="t" * 999, ok=True, seconds=0.1, arguments="a" * 999, output="b\ud800" * 999
    )
    decoded = decode(encode(call))
    assert isinstance(decoded, ToolEnded)
    assert (len(decoded.tool), len(decoded.arguments), len(decoded.output)) == (200, 400, 400) and "?" in decoded.output


def test_an_error_that_cannot_be_reported_does_not_stop_the_recording(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("in the way")
    reported = threading.Event()

    def fail(text: str) -> None:
        reported.set()
        raise RuntimeError("the loop is closed")

    log = EventLog(tmp_path, on_fault=fail)
    log.record(StageStarted(stage="train"))
    assert reported.wait(10)
    (tmp_path / "events").unlink()
    log.record(StageStarted(stage="evaluate"))
    log.close()
    assert [type(event).__name__ for event in read_events(tmp_path).events] == ["StageStarted", "StageStarted"]
