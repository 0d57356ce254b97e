"""The archive of a search: the states that networks reached, each with the shortest known network and a count of episodes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.base.files import write_atomically
from agentrl.base.untrusted_files import read_bytes
from sandboxes.networks.state import Comparator, Outputs, label, parse

MAX_STATES = 4000
"""Maximum number of states. The archive keeps the states that are nearest to a sorting network with few comparators."""
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A state: the shortest known network that reaches it, its unsorted outputs, and the number of episodes that reached it."""

    network: tuple[Comparator, ...]
    unsorted: int = 1
    visits: int = 0


@dataclass(slots=True)
class Archive:
    """The states that were reached, indexed by `Outputs.key`."""

    channels: int
    states: dict[str, Entry] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return key in self.states

    def add(self, networks: Iterable[Sequence[Comparator]]) -> int:
        """Adds every state that these networks (one per episode) reach. Returns the number of new states, including those beyond
        `MAX_STATES`, which are removed."""
        before = len(self.states)
        for network in networks:
            for key, entry in dict(self._reached(network)).items():
                known = self.states.get(key)
                best = entry if known is None or len(entry.network) < len(known.network) else known
                self.states[key] = replace(best, visits=(known.visits if known else 0) + 1)
        added = len(self.states) - before
        if len(self.states) > MAX_STATES:
            nearest = sorted(self.states.items(), key=lambda item: (len(item[1].network) + item[1].unsorted ** 0.5, item[0]))
            self.states = dict(nearest[:MAX_STATES])
        return added

    def _reached(self, network: Sequence[Comparator]) -> Iterator[tuple[str, Entry]]:
        outputs = Outputs.of(self.channels)
        for size, pair in enumerate(network, 1):
            outputs = outputs.after(pair)
            yield outputs.key, Entry(network=tuple(network[:size]), unsorted=outputs.unsorted)

    def draw(self, generator: random.Random, *, budget: int) -> Entry:
        """Returns a state to start from, with fewer than `budget` comparators. Rarely reached states are more likely. If there is no such
        unsorted state, returns the empty network."""
        open_states = [entry for _, entry in sorted(self.states.items()) if entry.unsorted and len(entry.network) < budget]
        if not open_states:
            return Entry(network=())
        return generator.choices(open_states, [1 / (1 + entry.visits) for entry in open_states])[0]

    def best(self) -> tuple[Comparator, ...] | None:
        """Returns the smallest network that sorts; None if no network in the archive sorts."""
        return min((entry.network for entry in self.states.values() if not entry.unsorted), key=len, default=None)

    def save(self, path: Path) -> None:
        """Writes the archive, and replaces the file atomically."""
        states = {
            key: {"network": [label(pair) for pair in entry.network], "unsorted": entry.unsorted, "visits": entry.visits}
            for key, entry in self.states.items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"channels": self.channels, "states": states}), durable=True)

    @classmethod
    def load(cls, path: Path) -> Archive:
        """Reads an archive. Raises `ValueError` if the file is not an archive, and `OSError` if it cannot be read."""
        try:
            data = json.loads(read_bytes(path, most=_MAX_BYTES, inside=path.parent))
            channels = int(data["channels"])
            states = {
                str(key): Entry(
                    network=tuple(parse(text, channels) for text in entry["network"]),
                    unsorted=int(entry["unsorted"]),
                    visits=int(entry["visits"]),
                )
                for key, entry in data["states"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not an archive of sorting networks: {type(error).__name__}: {error}") from None
        return cls(channels, states)
