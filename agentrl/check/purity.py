"""The same seed, split and index give the same task: drawn again, in another order, in another process."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.check.family_source import Draw, FamilySource, digests, draw_name
from agentrl.check.findings import Finding, Proof, join_examples, plural, shorten
from agentrl.check.subprocess_draw import draw_in_subprocess
from agentrl.protocols import TaskFamily
from agentrl.records import Split
from agentrl.task import make_task

NAME = "the same seed, split and index give the same task"
_FAR = tuple(10_007 * number for number in range(1, 9))  # indices drawn from an endless split, besides the first ones
_SEED_TASKS = 8

Drawn = Mapping[str, tuple[str, str]] | str


def prove_purity(source: FamilySource, sizes: Mapping[Split, int]) -> Proof:
    """Draws the tasks three times: in order; backwards, from the same family; and in another process with another hash seed."""
    family = source.open()
    draws = [(split, index) for split, size in sizes.items() for index in range(size)]
    draws += [(split, index) for split in Split if family.size(split) is None for index in _FAR]
    first = {draw: _drawn(family, draw) for draw in draws}
    again = {draw: _drawn(family, draw) for draw in reversed(draws)}
    try:
        other = dict(zip(draws, draw_in_subprocess(source, draws), strict=True))
    except RuntimeError as error:
        findings = [Finding(severity="failure", what=f"the family cannot be opened in another process: {error}")]
    else:
        findings = _differences(first, other, "in another process, with another hash seed")
    cannot = [draw for draw, one in first.items() if isinstance(one, str)]
    if cannot:
        what = f"{plural(len(cannot), 'task')} cannot be made: {first[cannot[0]]}"
        findings.insert(0, Finding(severity="failure", what=what, tasks=tuple(map(draw_name, cannot))))
    findings += _differences(first, again, "drawn again in another order")
    return Proof(
        name=NAME,
        looked_at=f"{plural(len(draws), 'task')}, each drawn three times, once in another process",
        findings=(*findings, *_by_seed(source, sizes)),
    )


def _drawn(family: TaskFamily, draw: Draw) -> Drawn:
    try:
        return digests(make_task(family, *draw))
    except Exception as error:  # a family is user code
        return f"{type(error).__name__}: {error}"


def _differences(first: Mapping[Draw, Drawn], second: Mapping[Draw, Drawn], how: str) -> list[Finding]:
    """One finding for all tasks that differ: which fields, and the first of them in both forms."""
    differing: dict[Draw, list[str]] = {}
    for draw, one in first.items():
        other = second[draw]
        if isinstance(one, str):
            continue
        names = ["the whole task"] if isinstance(other, str) else [n for n in {**one, **other} if one.get(n, "") != other.get(n, "")]
        if names:
            differing[draw] = names
    if not differing:
        return []
    draw, names = next(iter(differing.items()))
    one, other = first[draw], second[draw]
    was, now = ("a task", str(other)) if isinstance(one, str) or isinstance(other, str) else _apart(one, other, names[0])
    fields = list(dict.fromkeys(name for some in differing.values() for name in some))
    what = (
        f"{plural(len(differing), 'task')} of {len(first):,} differ {how}, in {join_examples(fields)};"
        f" {draw_name(draw)}: {names[0]} was {shorten(was)} and is {shorten(now)}"
    )
    return [Finding(severity="failure", what=what, tasks=tuple(map(draw_name, differing)))]


def _apart(first: Mapping[str, tuple[str, str]], second: Mapping[str, tuple[str, str]], name: str) -> tuple[str, str]:
    """A field's two texts, from shortly before their first difference."""
    one, other = _text(first, name), _text(second, name)
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, same - 20)
    return ("..." if begin else "") + one[begin:], ("..." if begin else "") + other[begin:]


def _text(drawn: Mapping[str, tuple[str, str]], name: str) -> str:
    return drawn[name][1] if name in drawn else "absent"


def _by_seed(source: FamilySource, sizes: Mapping[Split, int]) -> list[Finding]:
    """A note when another seed gives the same training tasks."""
    one, other = source.open(), source.open(seed=source.seed + 1)
    known = [size for size in (sizes[Split.TRAIN], other.size(Split.TRAIN), _SEED_TASKS) if size is not None]
    pairs = [(_drawn(one, (Split.TRAIN, index)), _drawn(other, (Split.TRAIN, index))) for index in range(min(known))]
    if not pairs or any(_without_id(first) != _without_id(second) for first, second in pairs):
        return []
    return [Finding(severity="note", what="another seed gives the same training tasks: the family makes no use of its seed")]


def _without_id(drawn: Drawn) -> Drawn:
    return drawn if isinstance(drawn, str) else {name: pair for name, pair in drawn.items() if name != "id"}
