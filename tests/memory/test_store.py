"""The store of notes: visibility, ranking, and the state after a crash."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.config.tools import MemoryConfig
from agentrl.errors import StoreError
from agentrl.memory import NoteStore, WrittenNotes
from agentrl.memory import store as store_module
from agentrl.memory.store import NoteMatch
from agentrl.records.episode import Memo

ROOT = Path(__file__).resolve().parents[2]
SCOPE = "family:f"


def note(episode: str, *texts: str, task: str = "", scope: str = SCOPE, read: tuple[str, ...] = ()) -> WrittenNotes:
    return WrittenNotes(episode=episode, task_key=task or f"task of {episode}", memo=Memo(scope=scope, notes=texts, read=read))


def texts(store: NoteStore, query: str, version: int = 1, *, task: str = "another", scope: str = SCOPE) -> list[str]:
    return [match.text for match in store.search(query, scope=scope, version=version, task_key=task)]


def simulated(store: NoteStore, seed: int, *, steps: int, behind: int) -> list[tuple[dict[str, object], tuple[NoteMatch, ...]]]:
    """Simulates a run whose episodes note a secret of their task and all notes that they read; returns the searches and their matches."""
    rng, searches = random.Random(seed), []
    for step in range(steps):
        version, group = max(0, step - behind), []
        for member in range(6):
            task, scope = rng.choice("abcdefgh"), f"family:{rng.choice('xy')}"
            query = " ".join(rng.choices(["secret", *"abcdefgh", "word"], k=rng.randrange(3)))
            arguments: dict[str, object] = {"query": query, "scope": scope, "version": version, "task_key": task}
            matches = store.search(query, scope=scope, version=version, task_key=task)
            searches.append((arguments, matches))
            copied = tuple(f"copied {step} {member}: {match.text}"[:3000] for match in matches)
            read = tuple(dict.fromkeys(match.episode for match in matches))
            group.append(note(f"{step}-{member}", f"secret-{task}- word {step} {member}", *copied, task=task, scope=scope, read=read))
        store.commit(step, group, oldest_read=0)
    return searches


@pytest.mark.parametrize("seed", range(3))
def test_no_secret_of_a_task_returns_to_it_through_copies(seed: int) -> None:
    config = MemoryConfig()
    store = NoteStore(None, config)
    searches = simulated(store, seed, steps=12, behind=1 + seed % 2)
    results = [(arguments, match) for arguments, matches in searches for match in matches]
    assert len(results) > 60 and any("copied" in match.text for _, match in results), "there is something to leak"
    for arguments, match in results:
        assert f"secret-{arguments['task_key']}-" not in match.text
        assert int(match.episode.split("-")[0]) < int(str(arguments["version"])), "the note is from an earlier version"
    for arguments, matches in searches:
        assert store.search(**arguments) == matches, "later notes change neither results nor their order"  # type: ignore[arg-type]
    assert {match.text for arguments, match in results if arguments["scope"] == "family:x"}.isdisjoint(
        match.text for arguments, match in results if arguments["scope"] == "family:y"
    )


def test_a_reader_in_another_process_hides_what_was_committed_since(tmp_path: Path) -> None:
    """A rollout worker reads the notes that the driver commits. The answer to a task must not reach its next attempt."""
    with closing(NoteStore(tmp_path / "notes", MemoryConfig())) as driver, closing(NoteStore(tmp_path / "notes", MemoryConfig())) as worker:
        driver.commit(0, [note("e0", "the answer is 4", task="t")])
        assert texts(worker, "answer", 1, task="t") == [] and texts(worker, "answer", 1) == ["the answer is 4"]
        driver.commit(1, [note("e1", "the answer is 5", task="t"), note("e2", "an answer", task="u", read=("e0",))], oldest_read=0)
        assert texts(worker, "answer", 2, task="t") == [] == texts(driver, "answer", 2, task="t")
        assert len(texts(worker, "answer", 2)) == 3


def test_rare_words_rank_higher_and_ties_go_to_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RESULTS", 3)
    store = NoteStore(None, MemoryConfig())
    notes = ("drawer 1: leases", "drawer 2: invoices", "drawers are locked", "Zürich keeps the invoices", "drawer 4: old")
    store.commit(0, [note("e0", *notes)])
    assert texts(store, "drawer invoice") == ["drawer 2: invoices", "Zürich keeps the invoices", "drawer 4: old"]
    assert texts(store, "ZURICH") == ["Zürich keeps the invoices"]
    assert texts(store, "") == ["drawer 4: old", "Zürich keeps the invoices", "drawers are locked"]
    assert texts(store, "") == texts(store, '"* \0 ()') == texts(store, "\U0001f600"), "a query without a word returns the newest notes"
    for hostile in ('a" OR "b', "NEAR(a b)", "drawer*", "text:drawer", "-drawer AND NOT x", "drawer " * 40, "{drawer} ^drawer \ud83d"):
        assert len(texts(store, hostile)) in (0, 3)
    assert texts(store, "locks") == ["drawers are locked"] and texts(store, "locks", 0) == [] == texts(store, "locks", scope="family:g")


def test_steps_are_committed_once_completely_and_in_order(tmp_path: Path) -> None:
    store = NoteStore(tmp_path / "notes.sqlite", MemoryConfig())
    assert store.commit(0, [note("e0", "one", "two"), note("e1", "one")]) and not store.commit(0, [note("e9", "three")])
    assert texts(store, "") == ["two", "one"] and store.counts() == {SCOPE: (2, 1)}, "a repeated text is stored once"
    with pytest.raises(StoreError, match="step 2 cannot be added before those of step 1"):
        store.commit(2, [])
    with pytest.raises(StoreError, match="read notes of nobody"):
        store.commit(1, [note("e2", "kept?"), note("e3", "no", read=("nobody",))])
    assert store.version == 1 and "kept?" not in texts(store, "", 9)
    store.close()
    store = NoteStore(tmp_path / "notes.sqlite", MemoryConfig())
    assert store.version == 1 and texts(store, "two") == ["two"]
    store.close()
    (tmp_path / "notes.sqlite").write_bytes(b"no database, but as long as one begins" * 200)
    with pytest.raises(StoreError, match="delete it; the run rebuilds it"):
        NoteStore(tmp_path / "notes.sqlite", MemoryConfig())


def test_old_notes_are_deleted_without_changing_readable_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RESULTS", 20)
    monkeypatch.setattr(store_module, "KEEP", 20)
    config, unpruned = MemoryConfig(), NoteStore(None, MemoryConfig())
    pruned = NoteStore(None, config)
    for step in range(30):
        new_notes = [note(f"{step}-{member}", *(f"word {step} {member} {n}" for n in range(3))) for member in range(4)]
        assert pruned.commit(step, new_notes, oldest_read=max(0, step - 1)) and unpruned.commit(step, new_notes, oldest_read=0)
        for version in range(max(0, step - 1), step + 2):
            for query in ("", "word", "1"):
                assert texts(pruned, query, version) == texts(unpruned, query, version) and len(texts(pruned, query, version)) <= 20
    ((notes, _),) = pruned.counts().values()
    assert notes <= 20 + 2 * 12


@pytest.mark.slow
def test_a_killed_process_leaves_complete_steps(tmp_path: Path) -> None:
    path = tmp_path / "notes.sqlite"
    code = (
        "import sys\nfrom pathlib import Path\nfrom agentrl.config.tools import MemoryConfig\nfrom agentrl.memory import NoteStore\n"
        "from tests.memory.test_store import note\nstore = NoteStore(Path(sys.argv[1]), MemoryConfig())\n"
        "for step in range(store.version, 10**9):\n"
        " store.commit(step, [note(f'{step}-{n}', f'word {step} {n}') for n in range(5)])\n print(step, flush=True)\n"
    )
    newest = -1
    for _ in range(2):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        first = writer.stdout.readline()
        assert first == f"{newest + 1}\n", "the process continues after the last complete step"
        time.sleep(0.05)
        os.kill(writer.pid, signal.SIGKILL)
        printed_steps = [int(step) for step in re.findall(r"\d+(?=\n)", first + writer.communicate(timeout=120)[0])]
        store = NoteStore(path, MemoryConfig())
        newest = store.version - 1
        assert newest in (printed_steps[-1], printed_steps[-1] + 1)
        assert texts(store, "", store.version)[:5] == [f"word {newest} {n}" for n in (4, 3, 2, 1, 0)]
        store.close()


def test_a_closed_store_raises_store_error() -> None:
    store = NoteStore(None, MemoryConfig())
    store.close()
    with pytest.raises(StoreError, match="closed database"):
        store.counts()


def test_common_words_are_looked_up_once() -> None:
    """Policies learn that such queries return something. Measures CPU time, so that a busy machine changes little."""
    words = " ".join(f"common{n}" for n in range(16))
    store = NoteStore(None, MemoryConfig(notes=64))
    for step in range(40):
        store.commit(step, [note(f"{step}-{n}", *(f"{words} {step} {n} {m}" for m in range(5))) for n in range(10)])
    started = time.process_time()
    assert texts(store, words, version=40)[0].endswith(" 39 9 4")
    assert time.process_time() - started < 0.08
    store.close()
