"""The parts of reasoning-gym that the family uses: the registry of datasets, their configurations and their curricula.

Only this module imports the package. Raises `UserError` at import if the package is missing.
"""

from __future__ import annotations

import difflib
from dataclasses import fields, replace
from typing import Any

from agentrl.base.installation import install_command
from agentrl.errors import UserError
from sandboxes.reasoning.mixture import Source

try:
    from reasoning_gym.factory import CURRICULA, DATASETS
except ImportError as error:
    raise UserError(
        f"the task family reasoning needs the package reasoning-gym ({error})", fix=f"run make smollm2, or {install_command('reasoning')}"
    ) from None

OWN_KEYS = ("seed", "size")  # set by the family


def names() -> list[str]:
    """Returns the names of all datasets in the package."""
    return sorted(DATASETS)


def dataset_class(name: str) -> Any:
    """Returns the class of a dataset. Raises `UserError` if the dataset does not exist."""
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3) or names()
        raise UserError(f"reasoning-gym has no dataset {name!r}", fix=f"use {' or '.join(near)}")
    return DATASETS[name][0]


def configuration(source: Source) -> Any:
    """Returns the configuration of a dataset with the source's level and keys.

    Raises `UserError` if the dataset, the level or a key does not exist.
    """
    dataset_class(source.name)
    config = DATASETS[source.name][1]() if source.level is None else _of_level(source)
    known = {field.name for field in fields(config)} - set(OWN_KEYS)
    if unknown := sorted(set(source.keys) - known):
        raise UserError(
            f"reasoning-gym's {source.name} has no key {unknown[0]!r}",
            fix=f"use one of its keys: {', '.join(sorted(known)) or 'it has none'}",
        )
    return replace(config, **source.keys)


def _of_level(source: Source) -> Any:
    if source.name not in CURRICULA:
        raise UserError(f"reasoning-gym has no levels for {source.name}", fix=f"set its keys instead, as in {source.name}(key=value)")
    curriculum = CURRICULA[source.name]()
    top = max((len(attribute.levels) - 1 for attribute in curriculum.attributes.values()), default=0)
    if source.level is None or source.level > top:
        raise UserError(f"{source.name}@{source.level}: its highest level is {top}", fix=f"use {source.name}@0 to {source.name}@{top}")
    curriculum.set_global_level(source.level)
    return curriculum.generate_configuration()
