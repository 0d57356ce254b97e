"""Writes and reads a run's event stream (`agentrl.observe.events`)."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate, islice
from pathlib import Path
from typing import BinaryIO

from agentrl.base.error_text import one_line_error
from agentrl.base.files import remove_torn_line
from agentrl.base.untrusted_files import open_file
from agentrl.observe.events import MAX_LINE, Event, EventsDropped, decode, encode

log = logging.getLogger(__name__)

FOLDER = "events"
"""Name of the folder for events in a run folder."""
_LOCK = ".lock"
SEGMENT_BYTES = 8 << 20
SEGMENTS = 32
"""Number of segments that are kept. Older segments are deleted."""
MAX_WAITING = 16384
"""Maximum number of events that wait in memory to be written. Additional events are dropped and counted."""
MAX_PAGE = 10_000
"""Maximum number of events in one page."""
_PAGE_BYTES = 4 << 20  # maximum number of bytes that one call reads
_BATCH = 128  # maximum number of events that are encoded at once
_FLUSH_S = 0.2
_RETRY_S = 5.0  # pause after a failed write
_CLOSE_S = 10.0
_MOST_FILES = 4096  # maximum number of files that are listed in the folder
_NAME = re.compile(r"([0-9]{15})\.jsonl\Z")


class EventLog:
    """Appends the events of one run to its event stream.

    `record` only adds an event to a queue. A thread encodes and writes the waiting events every 0.2 s.

    If writing fails, the run continues. `on_fault` is called once, from the thread. The events of the failed write are dropped, and later
    events wait until writing succeeds or `max_waiting` events wait.

    Args:
        run_dir: the run folder. If a different process is recording the run's events, nothing is written until that process exits.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        on_fault: Callable[[str], None] = log.warning,
        segment_bytes: int = SEGMENT_BYTES,
        segments: int = SEGMENTS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._folder, self._on_fault = run_dir / FOLDER, on_fault
        self._segment_bytes, self._segments, self._max_waiting = segment_bytes, segments, max_waiting
        self._waiting = deque[Event]()
        self._dropped, self._counting = 0, threading.Lock()  # number of dropped events that have not been reported in an event
        self._file: FileIO | None = None
        self._lock: int | None = None
        self._start = self._size = 0  # offset and size in bytes of the open segment
        self._failed_at = -_RETRY_S
        self._reported = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event log", daemon=True)
        self._thread.start()

    def record(self, event: Event) -> None:
        """Adds an event to the queue, or drops it if too many events are waiting or `close` was called. Returns at once and never raises.

        Any thread may call it.
        """
        if len(self._waiting) >= self._max_waiting or self._closing.is_set():
            self._count_dropped(1)
        else:
            self._waiting.append(event)

    def close(self) -> None:
        """Waits at most 10 s until the waiting events are written and the file is closed. Idempotent."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(_FLUSH_S):
            self._flush()
        self._failed_at = -_RETRY_S
        self._flush()
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            os.close(self._lock)

    def _flush(self) -> None:
        """Writes the waiting events. Never raises an exception."""
        if time.monotonic() - self._failed_at < _RETRY_S:
            return
        try:
            while self._waiting or self._dropped:
                if self._file is None:
                    self._open()
                if dropped := self._dropped:
                    self._write([EventsDropped(count=dropped)])
                    self._count_dropped(-dropped)
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _BATCH))]
                self._count_dropped(len(batch))  # counted as dropped until they are written
                self._write(batch)
                self._count_dropped(-len(batch))
        except Exception as error:  # a full disk, or an event that cannot be encoded
            self._failed_at = time.monotonic()
            if self._file is not None:
                self._file.close()
                self._file = None
            if not self._reported:
                self._reported = True
                fix = "check the disk, and check that only one process drives the run"
                with suppress(Exception):  # the thread continues, and writes when the disk has space again
                    self._on_fault(f"{self._folder}: events are not recorded: {one_line_error(error)}\n  fix: {fix}")

    def _count_dropped(self, count: int) -> None:
        with self._counting:
            self._dropped += count

    def _write(self, events: Iterable[Event]) -> None:
        lines = list(map(encode, events))
        while lines:
            room = self._segment_bytes - self._size
            count = max(1, sum(1 for size in accumulate(map(len, lines)) if size <= room))
            if self._size and len(lines[0]) > room:
                self._next_segment()
                continue
            self._append(b"".join(lines[:count]))
            del lines[:count]

    def _append(self, content: bytes) -> None:
        file = self._file
        assert file is not None, "a segment is open"
        try:
            if (written := file.write(content)) != len(content):
                raise OSError(errno.ENOSPC, f"{written} of {len(content)} bytes written")
        except OSError:
            os.ftruncate(file.fileno(), self._size)
            raise
        self._size += len(content)

    def _open(self) -> None:
        """Opens the newest segment. In a new folder, creates the first segment."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._start = max((start for start, _ in _segments(self._folder)), default=0)
        path = self._path(self._start)
        self._lock_folder()
        remove_torn_line(path)
        self._file = FileIO(path, "ab")
        self._size = self._file.seek(0, os.SEEK_END)

    def _lock_folder(self) -> None:
        """Locks the folder, because two writers would overwrite each other's segments. Raises `OSError` if a different process holds the
        lock."""
        if self._lock is not None:
            return
        lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)  # NFS cannot lock a folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise OSError(error.errno, "another process is recording events of this run") from None
        except OSError:
            os.close(lock)
            raise
        self._lock = lock

    def _next_segment(self) -> None:
        assert self._file is not None, "a full segment is open"
        self._file.close()
        self._file, self._start, self._size = None, self._start + self._size, 0
        self._file = FileIO(self._path(self._start), "ab")
        for _, path in _segments(self._folder)[: -self._segments]:
            path.unlink(missing_ok=True)

    def _path(self, start: int) -> Path:
        return self._folder / f"{start:015d}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """A sequence of events that follow an offset in the stream."""

    events: tuple[Event, ...]
    offset: int  # offset at which the next page starts
    skipped: int = 0  # number of lines that are not a known event: damaged, too long, or from a different version
    missed: int = 0  # number of deleted bytes between the requested offset and the first event


def read_events(run_dir: Path, *, after: int = 0, limit: int = 1000) -> EventPage:
    """Returns at most `limit` events (at most `MAX_PAGE`) that follow offset `after`, in order.

    If the last line is still being written, a later call returns its event. A page without events whose offset equals `after` means that
    there are no new events, or that the run has no events. One call reads at most 4 MiB.

    Raises `OSError` if the folder cannot be read, and `ValueError` if a segment is not a regular file in the folder.
    """
    events, skipped, missed = list[Event](), 0, 0
    segments = _segments(run_dir / FOLDER)
    offset = min(max(after, 0), _end(segments))
    budget = _PAGE_BYTES
    for number, (start, path) in enumerate(segments):
        end = segments[number + 1][0] if number + 1 < len(segments) else None
        if end is not None and end <= offset:
            continue
        missed, offset = missed + max(0, start - offset), max(start, offset)
        for size, line in _lines(run_dir, path, seek=offset - start, most=budget if end is None else min(budget, end - offset)):
            offset, budget = offset + size, budget - size
            event = _decoded(line)
            skipped += event is None
            events += [] if event is None else [event]
            if len(events) >= min(limit, MAX_PAGE):
                return EventPage(events=tuple(events), offset=offset, skipped=skipped, missed=missed)
        if budget <= MAX_LINE or end is None:
            break
    return EventPage(events=tuple(events), offset=offset, skipped=skipped, missed=missed)


def newest_offset(run_dir: Path, *, back: int = 256 << 10) -> int:
    """Returns the offset of a line that starts about `back` bytes before the end of the stream, for reading the newest events;
    0 if there are no events. Raises the errors of `read_events`."""
    segments = _segments(run_dir / FOLDER)
    if not segments:
        return 0
    wanted = max(_end(segments) - back, segments[0][0])
    start, path = max((segment for segment in segments if segment[0] <= wanted), default=segments[0])
    if wanted == start:
        return start
    with open_file(path, inside=run_dir) as file:
        file.seek(wanted - start - 1)
        return min(wanted - 1 + len(file.readline(MAX_LINE)), _end(segments))


def _segments(folder: Path) -> list[tuple[int, Path]]:
    """Returns pairs (offset, path) for the segments in a folder, in order."""
    try:
        with os.scandir(folder) as entries:
            names = [match for entry in islice(entries, _MOST_FILES) if (match := _NAME.match(entry.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(match[1]), folder / match[0]) for match in names)


def _end(segments: list[tuple[int, Path]]) -> int:
    """Returns the offset after the last byte of the stream."""
    if not segments:
        return 0
    start, path = segments[-1]
    try:
        return start + path.lstat().st_size
    except FileNotFoundError:  # deleted with the run
        return start


def _lines(run_dir: Path, path: Path, *, seek: int, most: int) -> Iterator[tuple[int, bytes]]:
    """Yields pairs (size, content) for the complete lines of a segment after position `seek`, at most `most` bytes in total.

    The content of a line that is too long is empty. Yields nothing if the segment was deleted in the meantime.
    """
    try:
        with open_file(path, inside=run_dir) as file:
            file.seek(seek)
            yield from _bounded_lines(file, most=most)
    except FileNotFoundError:
        return


def _bounded_lines(file: BinaryIO, *, most: int) -> Iterator[tuple[int, bytes]]:
    left = most
    while left > 0 and (line := file.readline(min(MAX_LINE + 1, left))):
        size, complete = len(line), line.endswith(b"\n")
        while not complete and size > MAX_LINE and size < left:
            part = file.readline(min(MAX_LINE + 1, left - size))
            if not part:
                break
            size, complete, line = size + len(part), part.endswith(b"\n"), b""
        if not complete and not (size >= left and size > MAX_LINE):
            return
        left -= size
        yield size, line if len(line) <= MAX_LINE else b""


def _decoded(line: bytes) -> Event | None:
    try:
        return decode(line)
    except (ValueError, RecursionError):
        return None
