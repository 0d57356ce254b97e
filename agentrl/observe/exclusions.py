"""Why episodes count in no figure: their reasons, told alike where they are alike, and how often each occurred."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from agentrl.records import Blame, ScoredEpisode

LONGEST = 240
"""Characters of one reason."""
MOST = 20
"""Reasons told apart; the rarest beyond them are counted together."""
OTHERS = "other reasons"

# What differs from episode to episode: addresses, hashes, and names such as g000012-3-a0 or agentrl-1f3c.
_NAMES = re.compile(r"0x[0-9a-f]+|\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b|\b(?=\w{0,63}-)(?=[\w-]{0,63}\d)[\w-]{6,64}\b")


def printable_text(text: str) -> str:
    """Text for a terminal: what programs, tests and models write may hold control sequences."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def exclusion_reason(scored: ScoredEpisode) -> str:
    """Why an episode was left out, in one bounded line without the names that differ from episode to episode; empty when it counts."""
    failure = next((one for one in reversed(scored.episode.failures) if one.blame is not Blame.POLICY), None)
    if failure is not None:
        return normalize_reason(f"{failure.blame}: {failure.kind}: {failure.message}")
    return "" if scored.score.value is not None else normalize_reason(scored.score.reason)


def normalize_reason(text: str) -> str:
    """A reason as it is counted: one printable line, names of single episodes and sandboxes as `*`, cut to `LONGEST`."""
    line = _NAMES.sub("*", printable_text(" ".join(text[: 4 * LONGEST].split())))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def count_exclusions(episodes: Iterable[ScoredEpisode]) -> dict[str, int]:
    """Reason -> episodes left out for it, the most frequent first."""
    return most_frequent(Counter(found for scored in episodes if (found := exclusion_reason(scored))))


def most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    """At most `MOST` reasons, the most frequent first; what is left is counted as `OTHERS`."""
    named = sorted((item for item in counts.items() if item[0] != OTHERS), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in named[MOST:]) + counts.get(OTHERS, 0)
    return dict(named[:MOST]) | ({OTHERS: rest} if rest else {})


def merge_counts(*several: Mapping[str, int]) -> dict[str, int]:
    """Counts of several places together."""
    total: Counter[str] = Counter()
    for counts in several:
        total.update(counts)
    return most_frequent(total)


def format_counts(counts: Mapping[str, int], *, first: int = 3) -> str:
    """The most frequent reasons with their counts, in one line."""
    shown = list(most_frequent(counts).items())
    text = "; ".join(f"{count} x {reason}" for reason, count in shown[:first])
    return f"{text}; and {sum(count for _, count in shown[first:])} for other reasons" if len(shown) > first else text
