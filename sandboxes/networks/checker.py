"""Verifies sorting networks by trying every order of the inputs. This module shares no code with the environment, its archive or its score.

    python sandboxes/networks/checker.py "1-2 3-4 1-3 2-4 2-3"

Prints whether the network sorts, its number of comparators, and the smallest known number. Exits with 1 if the network does not sort, and
with 2 if the argument is invalid or the network has more than 9 channels.
"""

from __future__ import annotations

import itertools
import sys

SMALLEST_KNOWN = {2: 1, 3: 3, 4: 5, 5: 9, 6: 12, 7: 16, 8: 19, 9: 25, 10: 29}
"""Channels -> number of comparators in the smallest known network. All are proven optimal (Codish et al., 2014; Harder, 2020)."""
_MOST_CHANNELS = 9  # 362,880 orders


def counterexample(pairs: list[tuple[int, int]], channels: int) -> tuple[int, ...] | None:
    """Returns inputs that the network does not sort; None if it sorts all inputs."""
    expected = tuple(range(channels))
    for inputs in itertools.permutations(expected):
        values = list(inputs)
        for first, second in pairs:
            if values[first] > values[second]:
                values[first], values[second] = values[second], values[first]
        if tuple(values) != expected:
            return inputs
    return None


def main(arguments: list[str]) -> int:
    """Checks the network in the command line arguments. Returns the exit code."""
    try:
        pairs = []
        for text in " ".join(arguments).split():
            first, second = (int(part) - 1 for part in text.split("-"))
            if not 0 <= first < second:
                raise ValueError(text)
            pairs.append((first, second))
        channels = max(second for _, second in pairs) + 1
    except ValueError:
        print('usage: python sandboxes/networks/checker.py "1-2 3-4 1-3 2-4 2-3"', file=sys.stderr)
        return 2
    if channels > _MOST_CHANNELS:
        print(f"{channels} channels are too many: all orders of at most {_MOST_CHANNELS} channels can be tried", file=sys.stderr)
        return 2
    wrong = counterexample(pairs, channels)
    if wrong is not None:
        print(f"does not sort: inputs {' '.join(map(str, wrong))}")
        return 1
    print(f"sorts {channels} channels with {len(pairs)} comparators; the smallest known network has {SMALLEST_KNOWN[channels]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
