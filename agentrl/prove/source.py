"""Where a task family comes from, so that it can be opened again: with another seed, in another process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.protocols import TaskFamily
from agentrl.recipe import TasksConfig
from agentrl.records import Split, Task
from agentrl.task import open_family

Place = tuple[Split, int]
_PARTED = ("data", "files", "binary_files")  # their parts are compared, and named, one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySource:
    """A family as a recipe names it, or a folder of task folders (`tasks.family` is its path)."""

    tasks: TasksConfig
    root: Path
    seed: int = 0

    def open(self, *, seed: int | None = None) -> TaskFamily:
        """Raises what `open_family` raises."""
        return open_family(self.tasks, seed=self.seed if seed is None else seed, root=self.root)


def place_name(place: Place) -> str:
    return f"{place[0]} {place[1]}"


def sizes(family: TaskFamily, count: int | None) -> dict[Split, int]:
    """Tasks of each split to look at: all there are, at most `count`. A split without end needs a count (`ValueError`)."""
    found: dict[Split, int] = {}
    for split in Split:
        size = family.size(split)
        if size is None and count is None:
            raise ValueError(f"{family.name} makes tasks without end")
        found[split] = min(one for one in (size, count) if one is not None)
    return found


def fields(task: Task) -> dict[str, str]:
    """Every field of a task as text by its name, such as `data.answer`. Raises `ValueError` that names a field which no JSON can hold."""
    return dict(_fields(asdict(task)))


def _fields(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        parts = {f"{name}.{key}": part for key, part in value.items()} if name in _PARTED else {name: value}
        for label, part in parts.items():
            try:
                text = json.dumps(part, sort_keys=True, ensure_ascii=False)
                text.encode()
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"{label} cannot be written as JSON: {type(error).__name__}: {error}") from None
            yield label, text


def digests(task: Task) -> dict[str, tuple[str, str]]:
    """Field -> hash of its text, and the beginning of the text for a person."""
    return {name: (hashlib.sha256(text.encode()).hexdigest(), text[:4000]) for name, text in fields(task).items()}
