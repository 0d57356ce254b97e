"""Measures the cost of reading the episodes of a run, and the cost of recording them.

    python benchmarks/view.py index --episodes 1000000 --folder /tmp/view     # first page, filters, search, one episode, memory
    python benchmarks/view.py cost --step-s 14                                # events and index, per step of the quickstart
    python benchmarks/view.py attached --steps 16                             # a viewer of a quickstart that trains

`index` generates a store once, with the tables that a run writes and bodies of a few hundred bytes, and then reads it in a new process
like a viewer: each query is a random combination of filters, orders or words. `cost` stores the same groups with and without the table of
episodes, alternating, and records the events of as many turns as a step has. `attached` trains the quickstart, and opens and closes the
page of the run in headless Chromium after every second step; the server of the view runs all the time. Prints Markdown, with the load of
the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.base.database import compress, transaction
from agentrl.base.files import read_json_lines
from agentrl.experience import SqliteStore, episode_rows
from agentrl.experience.episode_index import EpisodeIndex
from agentrl.experience.episode_query import EpisodeQuery
from agentrl.observe.event_log import EventLog
from agentrl.observe.run_events import EpisodeEvents
from agentrl.records import (
    Episode,
    Group,
    Message,
    SandboxSpec,
    Score,
    ScoredEpisode,
    Split,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    VersionSpan,
    codec,
)
from agentrl.testing.store_contract import make_group

SIZE = 8
"""Attempts of a group."""
PER_STEP = 16
"""Groups of a step, as in the quickstart."""
TURNS = 3
KINDS = [f"kind{number}" for number in range(12)]
TOOLS = ["python", "submit", "read_file", "search", "rarely"]
WORDS = [f"word{number}" for number in range(20_000)]
_BATCH = 2000  # groups of one transaction
_GOALS = {"first page": 1000.0, "filter": 300.0, "search": 300.0, "episode": 200.0}  # milliseconds


def words(source: random.Random, count: int) -> list[str]:
    """Returns words of which a few are in most episodes and most in few: word n occurs about 1 / (n + 1) as often as the first."""
    return [WORDS[int(len(WORDS) ** source.random()) - 1] for _ in range(count)]


def realistic_group(index: int, source: random.Random, *, turns: int = TURNS, tokens: int = 60) -> Group:
    """A group with as much text and as many tokens as one of the quickstart."""

    def turn(number: int) -> Turn:
        sampled = tuple(source.randrange(600) for _ in range(tokens))
        call = ToolCall(name=source.choice(TOOLS[:2]), arguments={"code": " ".join(words(source, 20))})
        return Turn(
            prompt_ids=tuple(source.randrange(600) for _ in range(40)),
            completion_ids=sampled,
            logprobs=tuple(-source.random() for _ in sampled),
            versions=(VersionSpan(version=index // PER_STEP, start=0, end=tokens),),
            message=Message(role="assistant", content=" ".join(words(source, 20)), tool_calls=(call,)),
            finish_reason="stop",
            tool_results=(ToolResult(name=call.name, output=" ".join(words(source, 40)), ok=True, wall_s=0.1),),
            generate_s=0.4,
            ended_at=time.time(),
        )

    def attempt(number: int) -> ScoredEpisode:
        trajectory = Trajectory(agent="main", turns=tuple(turn(at) for at in range(turns)))
        name = f"g{index:06d}-{number}-a0"
        episode = Episode(id=name, task_id=f"task-{index}", task_key="k", trajectories=(trajectory,), wall_s=4.0, answer="4")
        return ScoredEpisode(episode=episode, score=Score(value=float(number % 2), parts={"correct": 1.0}, evidence="compared"))

    prompt = (Message(role="user", content=" ".join(words(source, 60))),)
    episodes = tuple(attempt(number) for number in range(SIZE))
    return Group(index=index, task_id=f"task-{index}", task_key="k", episodes=episodes, kind=KINDS[index % 12], prompt=prompt)


def generate(folder: Path, episodes: int) -> Path:
    """Writes a store of `episodes` episodes, whose last group is as large as those of long tasks. Reuses a complete store."""
    path, complete = folder / "experience.sqlite", folder / f"complete-{episodes}"
    if complete.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    groups = episodes // SIZE - 1
    with closing(SqliteStore(path)) as store:
        db, source, began = store._connection, random.Random(0), time.monotonic()
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA cache_size = -400000")
        bodies = [compress(codec.to_json(realistic_group(number, source, turns=1, tokens=8))) for number in range(16)]
        labels = {(sort, name): episode_rows._label(db, sort, name) for sort, name in _labels()}
        for start in range(0, groups, _BATCH):
            with transaction(db):
                _insert(db, range(start, min(start + _BATCH, groups)), bodies, labels, source)
            print(f"\r{start * SIZE:,} episodes, {time.monotonic() - began:.0f} s", end="", file=sys.stderr)
        store.put(realistic_group(groups, source, turns=12, tokens=400))
    print(file=sys.stderr)
    complete.touch()
    return path


def _labels() -> Iterator[tuple[str, str]]:
    fixed = {"phase": ["train"], "split": ["train"], "outcome": ["solved", "partial", "failed", "excluded"], "kind": KINDS, "tool": TOOLS}
    fixed |= {"stop": ["submitted", "turn_limit"], "exclusion": ["", "exec_timeout"], "blame": ["", "infrastructure"]}
    yield from ((sort, name) for sort, names in fixed.items() for name in names)


def _insert(db: Any, groups: range, bodies: list[bytes], labels: dict[tuple[str, str], int], source: random.Random) -> None:
    """Inserts groups like `SqliteStore.put`, with rows whose values are random."""
    rows, tools, texts = [], [], []
    for group in groups:
        body = bodies[group % len(bodies)]
        db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (group, f"task-{group}", 0.0, SIZE, SIZE, 1, 0, 99, body))
        if group < groups.stop - PER_STEP:
            db.execute("INSERT INTO taken VALUES (?, ?, 'c', 99, '')", (group, group // PER_STEP))
        for attempt in range(SIZE):
            number, excluded = group * SIZE + attempt + 1, source.random() < 0.002
            score = None if excluded else round(source.random(), 2)
            outcome = "excluded" if score is None else "solved" if score > 0.9 else "failed" if score < 0.3 else "partial"
            names = {"phase": "train", "kind": source.choice(KINDS), "split": "train", "outcome": outcome}
            names |= {"stop": "turn_limit" if source.random() < 0.05 else "submitted"}
            names |= {"exclusion": "exec_timeout" if excluded else "", "blame": "infrastructure" if excluded else ""}
            version, called = group // PER_STEP, source.sample(TOOLS[:4], 2) + ["rarely"] * (source.random() < 0.0002)
            figures = (score, episode_rows.NO_SCORE if score is None else score, version, version + source.randrange(2))
            spent = (source.randrange(20, 2000), source.randrange(1, 12), source.random() * 60, 1.7e9 + number)
            row = (f"g{group:06d}-{attempt}-a0", group, attempt, None, *(labels[item] for item in names.items()), *figures, *spent)
            rows.append((*row, f"task-{group}", "{}", json.dumps(called)))
            tools += [(labels["tool", tool], number) for tool in called]
            texts.append((number, " ".join(words(source, 60))))
    db.executemany(episode_rows._INSERT, rows)
    db.executemany("INSERT INTO episode_tools VALUES (?, ?)", tools)
    db.executemany("INSERT INTO episode_text (rowid, text) VALUES (?, ?)", texts)


def random_filter(source: random.Random) -> EpisodeQuery:
    """A combination of one to three filters, in any order."""
    options: list[dict[str, Any]] = [
        {"kind": source.choice(KINDS)},
        {"outcome": source.choice(["solved", "partial", "failed", "excluded"])},
        {"tool": source.choice(TOOLS)},
        {"min_score": round(source.random(), 2)},
        {"max_score": round(source.random(), 2)},
        {"version": source.randrange(8000)},
        {"step": source.randrange(1, 7000)},
        {"exclusion": "exec_timeout"},
        {"min_tokens": source.randrange(20, 2000)},
        {"stop_reason": "turn_limit"},
    ]
    chosen: dict[str, Any] = {}
    for option in source.sample(options, source.randrange(1, 4)):
        chosen |= option
    return EpisodeQuery(**chosen, sort=source.choice(["newest", "score", "tokens", "turns", "seconds"]), descending=source.random() < 0.7)


def random_search(source: random.Random) -> EpisodeQuery:
    """One or two words, common and rare ones, with a filter in every third query."""
    text = " ".join(words(source, source.randrange(1, 3)))
    return replace(random_filter(source), text=text, sort="newest") if source.random() < 0.34 else EpisodeQuery(text=text)


def read(folder: Path, queries: int, seed: int) -> dict[str, Any]:
    """Times a reader in this process, in milliseconds of wall and CPU time, with its memory in MiB."""
    before, source = _resident(), random.Random(seed)
    began, began_cpu = time.perf_counter(), time.process_time()
    index = EpisodeIndex(folder)
    page = index.search(EpisodeQuery())
    times: dict[str, list[float]] = {"first page": [(time.perf_counter() - began) * 1000.0]}
    cpu: dict[str, list[float]] = {"first page": [(time.process_time() - began_cpu) * 1000.0]}
    slowest: dict[str, tuple[float, str]] = {}

    def timed(name: str, work: Callable[[], Any], what: object = "") -> None:
        started, started_cpu = time.perf_counter(), time.process_time()
        work()
        cpu.setdefault(name, []).append((time.process_time() - started_cpu) * 1000.0)
        spent = (time.perf_counter() - started) * 1000.0
        times.setdefault(name, []).append(spent)
        slowest[name] = max(slowest.get(name, (0.0, "")), (spent, str(what)))

    timed("facets", index.facets)
    timed("next page", lambda: index.search(EpisodeQuery(after=page.next)))
    for _ in range(queries):
        for name, query in (("filter", random_filter(source)), ("search", random_search(source))):
            timed(name, partial(index.search, query), query)
        number = source.randrange(page.total - SIZE)
        timed("episode", partial(index.episode, index.rows([number + 1])[0].id))
    timed("long episode", lambda: index.episode(page.rows[0].id))
    index.close()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) / 1024  # unlike `getrusage`, without that of the parent
    return {"times": times, "cpu": cpu, "slowest": slowest, "total": page.total, "peak_mib": peak, "grown_mib": _resident() - before}


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def print_index(folder: Path, episodes: int, queries: int, seed: int) -> None:
    """Generates a store if necessary, and prints the cost of reading it."""
    path = generate(folder, episodes)
    command = [sys.executable, __file__, "read", "--folder", str(folder), "--queries", str(queries), "--seed", str(seed)]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"{result['total']:,} episodes, {path.stat().st_size / 2**30:.2f} GiB, seed {seed}, load {os.getloadavg()[0]:.1f}\n")
    print("| what | queries | median ms | 95% ms | largest ms | largest CPU ms | goal ms |\n|" + " --- |" * 7)
    for name, times in result["times"].items():
        times.sort()
        cells = (statistics.median(times), times[int(0.95 * (len(times) - 1))], times[-1], max(result["cpu"][name]))
        print(f"| {name} | {len(times)} | {' | '.join(f'{cell:.1f}' for cell in cells)} | {_GOALS.get(name, ''):} |")
    print(f"\nmemory of the reader: {result['peak_mib']:.0f} MiB at most, {result['grown_mib']:.0f} MiB more than before (goal 300 MiB)")
    for name in ("filter", "search"):
        spent, query = result["slowest"][name]
        print(f"slowest {name}: {spent:.0f} ms, {query}")


def print_cost(step_s: float, rounds: int, seed: int) -> None:
    """Prints the CPU seconds of index and events per step of the quickstart. Other work on the machine changes CPU seconds least."""
    source = random.Random(seed)
    pairs = [_stored_pair(number, [realistic_group(index, source) for index in range(PER_STEP)]) for number in range(rounds)]
    plain, indexed = (statistics.median(values) for values in zip(*pairs, strict=True))
    turns = PER_STEP * SIZE * TURNS
    events = statistics.median(_recorded(turns) for _ in range(rounds))
    index_s, percent = indexed - plain, 100.0 / step_s
    print(f"{PER_STEP} groups of {SIZE}, {turns} turns, median of {rounds} rounds, seed {seed}, load {os.getloadavg()[0]:.1f}\n")
    print("| part of a step | CPU ms | share of a step |\n| --- | --- | --- |")
    print(f"| store the groups, without an index | {plain * 1e3:.1f} | {plain * percent:.2f}% |")
    print(f"| index of episodes | {index_s * 1e3:.1f} | {index_s * percent:.2f}% |")
    print(f"| events ({events / turns * 1e6:.0f} us a turn) | {events * 1e3:.1f} | {events * percent:.2f}% |")
    print(f"| index and events | {(index_s + events) * 1e3:.1f} | {(index_s + events) * percent:.2f}% (goal 2%, of {step_s:g} s) |")


def _stored_pair(number: int, groups: list[Group]) -> tuple[float, float]:
    """CPU seconds for storing groups one by one, without and with the index; every other round starts with the index."""
    insert, spent = episode_rows.insert_episodes, {False: 0.0, True: 0.0}
    for indexed in (number % 2 == 0, number % 2 == 1):
        with tempfile.TemporaryDirectory() as folder, closing(SqliteStore(Path(folder) / "experience.sqlite")) as store:
            store.put(make_group(10_000))
            episode_rows.insert_episodes = insert if indexed else lambda db, group, **options: []
            try:
                began = time.process_time()
                for group in groups:
                    store.put(group)
                spent[indexed] = time.process_time() - began
            finally:
                episode_rows.insert_episodes = insert
    return spent[False], spent[True]


def _recorded(turns: int) -> float:
    """CPU seconds of all threads for the events of `turns` turns, with their episodes, until they are in the file."""
    group = realistic_group(0, random.Random(0))
    task = Task(
        id="t",
        family="f",
        prompt=group.prompt,
        tools=(),
        sandbox=SandboxSpec(image="none"),
        verifiers=(),
        data={"kind": "join"},
        split=Split.TRAIN,
    )
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        log = EventLog(Path(folder))
        listener = EpisodeEvents(log.record)
        for number in range(turns // TURNS):
            scored = group.episodes[number % SIZE]
            listener.started(task, scored.episode.id, group=0, attempt=0, turns=0)
            for index, turn in enumerate(scored.episode.trajectories[0].turns):
                listener.turn_ended(scored.episode.id, 0, index, "main", turn)
                listener.tools_ended(scored.episode.id, 0, index, turn)
            listener.ended(scored.episode)
            listener.scored(scored)
        log.close()
        return time.process_time() - began


def print_attached(steps: int) -> None:
    """Trains the quickstart, and prints the cost of a viewer: CPU seconds of its processes per step, and the times of steps."""
    from playwright.sync_api import sync_playwright

    command = [str(Path(sys.executable).with_name("agentrl")), "train", "recipes/quickstart.py", f"steps={steps + 1}"]
    options = ["evaluation.heldout=0", "evaluation.heldout_real=0", "evaluation.sampling.temperature=1.0"]
    with tempfile.TemporaryDirectory() as root, sync_playwright() as playwright:
        folder = Path(root) / "runs" / "quickstart"
        folder.parent.mkdir()
        with (Path(root) / "log").open("w") as log:
            training = subprocess.Popen([*command, *options, "--run-dir", str(folder)], stdout=log, stderr=log)
        view = subprocess.Popen(
            [sys.executable, "-m", "agentrl", "view", str(folder.parent)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            assert view.stdout is not None
            address = next(word for line in view.stdout for word in line.split() if word.startswith("http"))
            _next_step(folder, training, 0)  # warm-up
            rows: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
            for step in range(1, steps + 1):
                watched = step % 2 == 0
                page = browser.new_page() if watched else None
                if page is not None:
                    page.goto(address)
                    page.goto(f"{address.partition('?')[0]}#/run/quickstart")
                server0_s, browser0_s = _cpu_s(view.pid), _cpu_s(os.getpid(), children=True)
                line = _next_step(folder, training, step)
                rows[watched].append((line["step_s"], _cpu_s(view.pid) - server0_s, _cpu_s(os.getpid(), children=True) - browser0_s))
                if page is not None:
                    page.close()
        finally:
            browser.close()
            for process in (training, view):
                process.terminate()
                process.wait(60)
    print(f"{steps} steps, every second one with a page open, load {os.getloadavg()[0]:.1f}\n")
    print(
        "| | step s, median [least, most] | CPU s of the server per step | share of a step | CPU s of the browser per step |\n|"
        + " --- |" * 5
    )
    for watched, values in rows.items():
        times, server_s, browser_s = (list(column) for column in zip(*values, strict=True))
        share = sum(server_s) / sum(times)
        cells = f"{statistics.median(times):.2f} [{min(times):.2f}, {max(times):.2f}] | {statistics.fmean(server_s):.3f} | {share:.2%}"
        print(f"| {'with a page' if watched else 'without'} | {cells} | {statistics.fmean(browser_s):.2f} |")


def _next_step(folder: Path, training: subprocess.Popen[bytes], after: int) -> dict[str, Any]:
    """Waits for the line of the step after step `after`, and returns it."""
    while training.poll() is None:
        lines = read_json_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        line = next((line for line in lines if line["step"] == after + 1), None)
        if line is not None:
            return line
        time.sleep(0.1)
    raise SystemExit(f"the run ended after step {after}: {(folder.parents[1] / 'log').read_text()[-2000:]}")


def _cpu_s(pid: int, *, children: bool = False) -> float:
    """CPU seconds of a process with its descendants that live; with `children`, only of browsers below it."""
    parents, spent = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        fields, number = rest.split(), int(path.parent.name)
        parents[number] = int(fields[1])
        spent[number] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if not children or "chrom" in name else 0.0
    total = 0.0
    for number, seconds in spent.items():
        above = number
        while above not in (0, pid):
            above = parents.get(above, 0)
        total += seconds if above == pid else 0.0
    return total


def main() -> None:
    """Runs one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("index", "cost", "attached", "read"), help="`read` is the process that `index` starts")
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "agentrl-view")
    parser.add_argument("--queries", type=int, default=40, help="queries of each kind")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--step-s", type=float, default=14.0, help="seconds of a step of the quickstart on this machine")
    parser.add_argument("--steps", type=int, default=16, help="steps of the quickstart, alternately with and without a viewer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.part == "read":
        print(json.dumps(read(args.folder, args.queries, args.seed)))
    elif args.part == "index":
        print_index(args.folder, args.episodes, args.queries, args.seed)
    elif args.part == "attached":
        print_attached(args.steps)
    else:
        print_cost(args.step_s, args.rounds, args.seed)


if __name__ == "__main__":
    main()
