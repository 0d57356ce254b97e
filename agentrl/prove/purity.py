"""The same seed, split and index give the same task: again, in another order, in another process."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.protocols import TaskFamily
from agentrl.prove.elsewhere import draw_elsewhere
from agentrl.prove.findings import Finding, Proof, clipped, examples, plural
from agentrl.prove.source import FamilySource, Place, digests, place_name
from agentrl.records import Split
from agentrl.task import make_task

NAME = "the same seed, split and index give the same task"
_FAR = tuple(10_007 * number for number in range(1, 9))  # of a split without end, besides the first tasks
_SEED_TASKS = 8

Drawn = Mapping[str, tuple[str, str]] | str


def prove_purity(source: FamilySource, sizes: Mapping[Split, int]) -> Proof:
    """Draws the tasks three times: in order; backwards, from the same family; and in another process with another hash seed."""
    family = source.open()
    places = [(split, index) for split, size in sizes.items() for index in range(size)]
    places += [(split, index) for split in Split if family.size(split) is None for index in _FAR]
    first = {place: _draw(family, place) for place in places}
    again = {place: _draw(family, place) for place in reversed(places)}
    try:
        other = dict(zip(places, draw_elsewhere(source, places), strict=True))
    except RuntimeError as error:
        found = [Finding(severity="failure", what=f"the family cannot be opened in another process: {error}")]
    else:
        found = _differences(first, other, "in another process, with another hash seed")
    cannot = [place for place, one in first.items() if isinstance(one, str)]
    if cannot:
        what = f"{plural(len(cannot), 'task')} cannot be made: {first[cannot[0]]}"
        found.insert(0, Finding(severity="failure", what=what, tasks=tuple(map(place_name, cannot))))
    found += _differences(first, again, "drawn again in another order")
    return Proof(
        name=NAME,
        looked_at=f"{plural(len(places), 'task')}, each drawn three times, once in another process",
        findings=(*found, *_by_seed(source, sizes)),
    )


def _draw(family: TaskFamily, place: Place) -> Drawn:
    try:
        return digests(make_task(family, *place))
    except Exception as error:  # a family is anybody's code
        return f"{type(error).__name__}: {error}"


def _differences(first: Mapping[Place, Drawn], second: Mapping[Place, Drawn], how: str) -> list[Finding]:
    """One finding for all tasks that are not the same: which fields differ, and the first of them in both forms."""
    differing: dict[Place, list[str]] = {}
    for place, one in first.items():
        other = second[place]
        if isinstance(one, str):
            continue
        names = ["the whole task"] if isinstance(other, str) else [n for n in {**one, **other} if one.get(n, "") != other.get(n, "")]
        if names:
            differing[place] = names
    if not differing:
        return []
    place, names = next(iter(differing.items()))
    one, other = first[place], second[place]
    was, now = ("a task", str(other)) if isinstance(one, str) or isinstance(other, str) else _apart(one, other, names[0])
    fields = list(dict.fromkeys(name for found in differing.values() for name in found))
    what = (
        f"{plural(len(differing), 'task')} of {len(first):,} differ {how}, in {examples(fields)};"
        f" {place_name(place)}: {names[0]} was {clipped(was)} and is {clipped(now)}"
    )
    return [Finding(severity="failure", what=what, tasks=tuple(map(place_name, differing)))]


def _apart(first: Mapping[str, tuple[str, str]], second: Mapping[str, tuple[str, str]], name: str) -> tuple[str, str]:
    """The texts of a field from shortly before the place where they part."""
    one, other = _text(first, name), _text(second, name)
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, same - 20)
    return ("..." if begin else "") + one[begin:], ("..." if begin else "") + other[begin:]


def _text(drawn: Mapping[str, tuple[str, str]], name: str) -> str:
    return drawn[name][1] if name in drawn else "absent"


def _by_seed(source: FamilySource, sizes: Mapping[Split, int]) -> list[Finding]:
    """Whether another seed gives other training tasks; where it does not, that is only good to know."""
    one, other = source.open(), source.open(seed=source.seed + 1)
    known = [size for size in (sizes[Split.TRAIN], other.size(Split.TRAIN), _SEED_TASKS) if size is not None]
    pairs = [(_draw(one, (Split.TRAIN, index)), _draw(other, (Split.TRAIN, index))) for index in range(min(known))]
    if not pairs or any(_without_id(first) != _without_id(second) for first, second in pairs):
        return []
    return [Finding(severity="note", what="another seed gives the same training tasks: the family makes no use of its seed")]


def _without_id(drawn: Drawn) -> Drawn:
    return drawn if isinstance(drawn, str) else {name: pair for name, pair in drawn.items() if name != "id"}
