"""Measures every dataset of reasoning-gym and writes the lists of docs/reasoning.md and docs/reasoning-datasets.json.

    python docs/generate_reasoning_table.py            # writes both; about five minutes
    python docs/generate_reasoning_table.py --check    # exits with 1 if either is out of date
    python docs/generate_reasoning_table.py --only gcd countdown      # prints the measurements of these datasets

It runs itself twice more with other hash seeds, to check that a dataset generates the same problems there (`--digests`).

The exit code is 1, with the reason, if a dataset of `sandboxes/reasoning/catalogue.py` does not meet its requirements.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl.check import cheats  # noqa: E402
from agentrl.records import Episode, Message, SandboxSpec, Score, Split, Task  # noqa: E402
from agentrl.reward import TaskScorer  # noqa: E402
from sandboxes.reasoning import catalogue, package, problems  # noqa: E402
from sandboxes.reasoning.mixture import Source  # noqa: E402
from sandboxes.reasoning.problems import Problem  # noqa: E402
from sandboxes.reasoning.worked import PROGRAMS  # noqa: E402

PAGE = ROOT / "docs" / "reasoning.md"
RESULTS = ROOT / "docs" / "reasoning-datasets.json"
BEGIN, END = "<!-- lists: docs/generate_reasoning_table.py -->", "<!-- end of lists -->"
PROBLEMS = 6
"""Problems per part that are scored with every answer."""
DRAWN = 60
"""Problems drawn to count repeated questions and answers."""
SLOW_S = 0.5
"""Seconds per problem above which a dataset is excluded, because every episode waits for its problem."""
GUESSED = 0.45
"""Share of problems with one right answer above which a dataset is excluded."""
FAVOURED = 0.6
"""The limit for `CONSTANTS`, over the scored problems. It is higher because there are fewer of them."""
NOTHING: Mapping[str, str | None] = {
    **cheats.ANSWERS,
    **cheats.MALFORMED_ANSWERS,
    "white space": " \n\t ",
    "a question mark": "?",
    "nested brackets": "(" * 300 + "1" + ")" * 300,
    "a list of ones": "[" + "1," * 400 + "1]",
    "every digit": " ".join("0123456789"),
    "a fraction with an exponent": "1e99999999/3",
    "a tower of powers": "9**9**9**9",
    "a move so many times": "R99999999",
    "a call": "__import__('os').getpid()",
}
"""Answers without work. No scorer may give full marks for one, or fail at it."""
CONSTANTS = (
    *("null", "None", "[]", "{}", "()", "''", "[[]]", "[0]", "0", "1", "-1", "2", "10", "100", "0.5", "0.0", "1e9", "1e99999999", "-inf"),
    *("a", "x", "A", "C", "True", "False", "yes", "no", "Yes", "No", "on", "off", "Monday", "0 days", "00:00", "0, 0", "1 1", "0x0", "i"),
)
"""Answers that are sometimes right, as are those to other problems. No scorer may fail at one, and none may be right too often."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one dataset."""

    name: str
    wrong: tuple[str, ...] = ()
    """Reasons against the dataset."""
    category: str = ""
    distinct: int = 0
    drawn: int = 0
    commonest: float = 0.0
    paid: float = 0.0
    """The highest mark of an answer without work."""
    paid_for: str = ""
    seconds: float = 0.0
    levels: bool = field(default=False)


def digests(names: Sequence[str]) -> dict[str, str]:
    """A hash of some problems of each dataset that is in, or is left out for making others elsewhere."""
    found = {}
    for name in names:
        if name in catalogue.LEFT_OUT and catalogue.LEFT_OUT[name] != catalogue.OTHERWISE:
            continue
        made = [problems.entry(Source(name=name), 0, number) for number in range(DRAWN // 2)]
        text = json.dumps([[one["question"], one["answer"]] for one in made])
        found[name] = hashlib.sha256(text.encode()).hexdigest()
    return found


def elsewhere(names: Sequence[str]) -> set[str]:
    """Datasets that make other problems in a process with another hash seed."""
    seen = []
    for seed in ("1", "2"):
        command = [sys.executable, __file__, "--digests", "--only", *names]
        done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        seen.append(json.loads(done.stdout))
    return {name for name in seen[0] if seen[0][name] != seen[1][name]}


async def measure(name: str, scorer: TaskScorer, differs: bool) -> Measured:
    source = Source(name=name)
    try:
        problems.check(source)
        started = time.process_time()
        drawn = [problems.entry(source, 0, number) for number in range(DRAWN // 10)]
        seconds = (time.process_time() - started) / len(drawn)
        drawn += [problems.entry(source, 0, number) for number in range(len(drawn), DRAWN) if seconds <= SLOW_S]
    except Exception as error:
        return Measured(name=name, wrong=(f"no problem can be made: {type(error).__name__}: {error}",))
    category = package.dataset_class(name).__module__.split(".")[1]
    if seconds > SLOW_S:
        return Measured(name=name, category=category, wrong=(f"a problem takes {seconds:.1f} s to make",))
    wrong = [catalogue.OTHERWISE] if differs else []
    if any(not isinstance(one["answer"], str) for one in drawn):
        return Measured(name=name, category=category, wrong=(*wrong, "its problems come without an answer, so that nothing proves them"))
    answer, times = Counter(one["answer"] for one in drawn).most_common(1)[0]
    if times > GUESSED * DRAWN:
        wrong.append(f"one answer, {answer!r}, is right in {times / DRAWN:.0%} of its problems")
    if catalogue.LEFT_OUT.get(name) == catalogue.EVALUATES:
        return Measured(name=name, category=category, wrong=(*wrong, catalogue.EVALUATES))  # nothing odd is handed to it here either
    judged = [problems.problem(source, seed=0, heldout=heldout, number=number) for heldout in (False, True) for number in range(PROBLEMS)]
    wrong += sorted({problem async for problem in _gold(judged, scorer)})
    marks = [mark async for mark in _marks(judged, scorer)]
    wrong += _faults_of(marks)
    paid = max((mark for mark in marks if not mark.sometimes), key=lambda mark: mark.partial)
    return Measured(
        name=name,
        wrong=tuple(wrong),
        category=category,
        distinct=len({problems.digest(one["question"]) for one in drawn}),
        drawn=DRAWN,
        commonest=times / DRAWN,
        paid=paid.partial,
        paid_for=paid.what,
        seconds=seconds,
        levels=name in package.CURRICULA,
    )


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What one answer got for one problem; `value` None: nothing, for `reason`."""

    what: str
    value: float | None
    partial: float
    reason: str
    sometimes: bool
    """Whether the answer may be right by chance."""


def _faults_of(marks: Sequence[Mark]) -> Iterator[str]:
    failed = [mark for mark in marks if mark.value is None]
    if failed:
        yield f"its scorer fails at {_some(failed)}: {failed[0].reason.rpartition(' raised ')[2][:120]}"
    full = [mark for mark in marks if mark.value and not mark.sometimes]
    if full:
        yield f"its scorer gives full marks for {_some(full)}"
    for what, times in Counter(mark.what for mark in marks if mark.value and mark.sometimes).items():
        if times > FAVOURED * 2 * PROBLEMS:
            yield f"its scorer gives full marks for {what!r} in {times} of {2 * PROBLEMS} problems"


def _some(marks: Sequence[Mark]) -> str:
    names = list(dict.fromkeys(mark.what for mark in marks))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other answers"


async def _gold(judged: Sequence[Problem], scorer: TaskScorer) -> AsyncIterator[str]:
    for one in judged:
        score = await _score(scorer, one, one.answer)
        if score.value is None:
            yield f"its scorer has no mark for the right answer: {score.reason}"
        elif score.value != 1.0:
            yield "its scorer gives less than full marks for its own answer"


async def _marks(judged: Sequence[Problem], scorer: TaskScorer) -> AsyncIterator[Mark]:
    for one in judged:
        echoes = {"the question": one.question, "half of the question": one.question[: len(one.question) // 2]}
        echoes["nan for every number"] = re.sub(r"-?\d+(?:\.\d+)?", "NaN", one.answer) if re.search(r"\d", one.answer) else "NaN"
        if one.source.name not in catalogue.SEVERAL:
            echoes["the answer, and more"] = f"{one.answer} {one.answer}"
        others = {f"the answer to problem {place}": other.answer for place, other in enumerate(judged) if other is not one}
        for what, answer in {**NOTHING, **echoes, **others, **{text: text for text in CONSTANTS}}.items():
            score = await _score(scorer, one, answer)
            partial = max((value for part, value in score.parts.items() if part.endswith("/partial")), default=0.0)
            yield Mark(what=what, value=score.value, partial=partial, reason=score.reason, sometimes=what in CONSTANTS or what in others)


async def _score(scorer: TaskScorer, one: Problem, answer: str | None) -> Score:
    task = Task(
        id="t",
        family="reasoning",
        prompt=(Message(role="user", content=one.question),),
        tools=(),
        sandbox=SandboxSpec(image="sandboxes/tables"),
        verifiers=("rewards.reasoning:own_scorer",),
        data={"kind": one.source.name, "answer": one.answer, "origin": one.origin()},
        split=Split.TRAIN,
    )
    return await scorer(task, Episode(id="e", task_id=task.id, task_key=task.key, trajectories=(), answer=answer))


async def _all(names: Sequence[str], show: bool) -> list[Measured]:
    scorer, found, differing = TaskScorer(), [], elsewhere(names)
    for name in names:
        started = time.monotonic()
        found.append(await measure(name, scorer, name in differing))
        if show:
            print(f"{time.monotonic() - started:6.1f} s", found[-1], flush=True)
    return found


Figures = dict[str, dict[str, Any]]


def figures(found: Sequence[Measured]) -> Figures:
    """Returns the measurements of the available datasets, by name."""
    return {
        one.name: {
            "subject": one.category,
            "levels": one.levels,
            "program": one.name in PROGRAMS,
            "different_questions": one.distinct,
            "questions": one.drawn,
            "most_frequent_answer": round(one.commonest, 2),
            "highest_mark_without_work": round(one.paid, 2),
            "answer_without_work": one.paid_for if one.paid >= 0.005 else "",
        }
        for one in found
        if one.name not in catalogue.LEFT_OUT
    }


def lists(measured: Figures) -> str:
    """Returns the lists of available and of excluded datasets in Markdown."""
    frequent = max(measured, key=lambda name: measured[name]["most_frequent_answer"])
    paid = max(measured, key=lambda name: measured[name]["highest_mark_without_work"])
    return "\n".join(
        [
            f"{len(measured)} datasets are available (`docs/reasoning-datasets.json`)."
            f" Without levels: {_names(name for name, one in measured.items() if not one['levels'])}.",
            f"With a program for solved problems: {_names(name for name, one in measured.items() if one['program'])}.",
            f"The most frequent answer is right in at most {measured[frequent]['most_frequent_answer']:.0%} of the problems"
            f" (`{frequent}`). The highest mark of a scorer for an answer without work is"
            f" {measured[paid]['highest_mark_without_work']:.2f} (`{paid}`).",
            f"{len(catalogue.LEFT_OUT)} are excluded; selecting one prints the reason: {_names(sorted(catalogue.LEFT_OUT))}.",
        ]
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _no_more(found: Sequence[Measured]) -> Iterator[str]:
    """Datasets that are left out and could be in, as far as is measured here."""
    yield from (
        f"{one.name} is left out, and nothing is wrong with it now" for one in found if not one.wrong and one.name in catalogue.LEFT_OUT
    )


def _faults(found: Sequence[Measured]) -> Iterator[str]:
    for one in found:
        if one.wrong and one.name not in catalogue.LEFT_OUT:
            yield f"{one.name}: {'; '.join(one.wrong)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a file is out of date")
    logging.getLogger("agentrl").setLevel(logging.CRITICAL)  # scorers that raise are in what is found
    parser.add_argument("--only", nargs="+", default=[], help="datasets to measure and print")
    parser.add_argument("--digests", action="store_true", help="only print a hash of some problems of each")
    arguments = parser.parse_args()
    if arguments.digests:
        report = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # datasets print too, some of them when the process ends
        json.dump(digests(arguments.only), report)
        report.close()
        return 0
    found = asyncio.run(_all(arguments.only or package.names(), bool(arguments.only)))
    faults = list(_faults(found))
    print("\n".join([*faults, *_no_more(found)]), file=sys.stderr)
    if arguments.only or faults:
        return 1 if faults else 0
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    measured = figures(found)
    wanted = f"{before}{BEGIN}\n{lists(measured)}\n{END}{rest.partition(END)[2]}"
    results = json.dumps(measured, indent=1) + "\n"
    if arguments.check:
        return int(wanted != text or not RESULTS.is_file() or results != RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(wanted, encoding="utf-8")
    RESULTS.write_text(results, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
