"""The source of a task family, from which it can be reopened with another seed or in another process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config.recipe import MCPConfig, TasksConfig, ToolConfig
from agentrl.protocols import TaskFamily
from agentrl.records import Split, Task
from agentrl.task import open_family

Draw = tuple[Split, int]  # a task by split and index
_PARTED = ("data", "files", "binary_files")  # fields that are compared entry by entry


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySource:
    """A family by its recipe, or a folder of task folders (`tasks.family` is its path)."""

    tasks: TasksConfig
    root: Path
    seed: int = 0
    mcp: Mapping[str, MCPConfig] = field(default_factory=dict)
    tools: Mapping[str, ToolConfig] = field(default_factory=dict)

    def open(self, *, seed: int | None = None) -> TaskFamily:
        """Opens the family. Raises as `open_family` does."""
        return open_family(self.tasks, seed=self.seed if seed is None else seed, root=self.root)


def draw_name(draw: Draw) -> str:
    """The draw as text, such as "train 3"."""
    return f"{draw[0]} {draw[1]}"


def split_sizes(family: TaskFamily, count: int | None) -> dict[Split, int]:
    """Number of tasks to examine of each split, at most `count`. Raises `ValueError` for an endless split without a count."""
    number: dict[Split, int] = {}
    for split in Split:
        size = family.size(split)
        if size is None and count is None:
            raise ValueError(f"{family.name} has endless tasks")
        number[split] = min(limit for limit in (size, count) if limit is not None)
    return number


def field_texts(task: Task) -> dict[str, str]:
    """Field (such as `data.answer`) -> text, for all fields of a task. Raises `ValueError` with the field if one is not JSON."""
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
    """Field -> hash of its text, and the start of the text for display."""
    return {name: (hashlib.sha256(text.encode()).hexdigest(), text[:4000]) for name, text in field_texts(task).items()}
