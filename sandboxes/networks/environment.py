"""The environment: the agent adds one comparator at a time until the network sorts or the budget of comparators is used up."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.environment import Environment
from agentrl.errors import UserError
from agentrl.records import Step
from sandboxes.networks.archive import Archive, Entry
from sandboxes.networks.state import MAX_CHANNELS, Comparator, Outputs, comparators, label, parse


class SortingNetwork(Environment):
    """The agent builds a sorting network with few comparators.

    The reward is given at the end. For a network that sorts, it is 1 plus the unused share of the budget. Otherwise it is at most 0.5, and
    decreases with each doubling of the number of unsorted 0-1 outputs. With an archive, the part `novelty` rewards the share of reached
    states that are new.

    Args:
        channels: number of inputs, from 2 to 10.
        budget: maximum number of comparators, including those of the initial network.
        archive: file of an `Archive`. An episode starts from a state in the archive with the probability `restarts`.
        restarts: probability that an episode starts from a state in `archive`.
        novelty: weight of the part `novelty`, from 0 to 1.
    """

    rewards = (0.0, 3.0)

    def __init__(self, channels: int = 6, budget: int = 16, archive: str = "", restarts: float = 0.5, novelty: float = 0.2) -> None:
        if not 2 <= channels <= MAX_CHANNELS or budget < 1:
            raise UserError(
                f"channels={channels} must be from 2 to {MAX_CHANNELS}, and budget={budget} at least 1", fix="correct tasks.family.options"
            )
        if not 0 <= restarts <= 1 or not 0 <= novelty <= 1:
            raise UserError(f"restarts={restarts} and novelty={novelty} must be from 0 to 1", fix="correct tasks.family.options")
        self.instructions = f"Sort {channels} channels. Add one comparator per turn."
        self.actions = tuple(map(label, comparators(channels)))
        self._channels, self._budget = channels, budget
        self._archive = Archive.load(Path(archive)) if archive else None
        if self._archive is not None and self._archive.channels != channels:
            raise UserError(
                f"archive={archive} has {self._archive.channels} channels, not channels={channels}",
                fix=f"use an archive with {channels} channels, or set channels={self._archive.channels}",
            )
        self._restarts, self._novelty = restarts, novelty

    def reset(self, seed: int) -> str:
        """Returns the initial observation: the empty network, or a network from the archive."""
        generator, start = random.Random(seed), Entry(network=())
        if self._archive is not None and generator.random() < self._restarts:
            start = self._archive.draw(generator, budget=self._budget)
        self._network: list[Comparator] = list(start.network)
        self._outputs = Outputs.of(self._channels, self._network)
        self._reached: list[str] = []
        return f"start {' '.join(map(label, self._network)) or 'empty'} unsorted {self._outputs.unsorted}"

    def step(self, action: Any) -> Step | tuple[Any, ...]:
        """Adds a comparator."""
        pair = parse(str(action), self._channels)
        self._network.append(pair)
        self._outputs = self._outputs.after(pair)
        self._reached.append(self._outputs.key)
        unsorted, size = self._outputs.unsorted, len(self._network)
        if unsorted and size < self._budget:
            return f"unsorted {unsorted}", 0.0, False
        parts = self._parts(unsorted, size)
        return f"unsorted {unsorted}", parts["quality"] + self._novelty * parts["novelty"], True, False, parts

    def _parts(self, unsorted: int, size: int) -> dict[str, float]:
        quality = 1 + (self._budget - size) / self._budget
        if unsorted:
            quality = 0.5 * (1 - math.log1p(unsorted) / math.log1p(1 << self._channels))
        known: Sequence[str] | Archive = self._archive if self._archive is not None else self._reached
        new = sum(key not in known for key in set(self._reached)) / len(self._reached)
        return {"quality": quality, "novelty": new, "comparators": float(size), "sorts": float(not unsorted)}
