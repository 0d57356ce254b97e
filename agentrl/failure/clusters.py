"""Clusters of alike failures: the same words in, the same clusters out, in time that suits a person.

Leader clustering: traces are taken in order, the commonest sorts first; each joins the cluster whose leader is most alike it, if one
is alike enough, and else leads one of its own. By default likeness is the cosine of weighted features (`agentrl.failure.features`),
rare ones weighing more (TF-IDF); with an embedding it is that of its vectors.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.failure.features import extract_features
from agentrl.failure.trace import Trace
from agentrl.failure.triage import deciding_tag_name

MIN_SIMILARITY = 0.62
"""Least cosine of two traces of one cluster, by features."""
MIN_EMBEDDING_SIMILARITY = 0.75
"""The same, by embeddings."""
MOST_CLUSTERS = 500
"""Traces that are like none of so many are put together in one last cluster."""
_SHOWN = 6  # features that say what a cluster is

Vector = Mapping[int, float]
"""A unit vector, without its zeros."""
Embedding = Callable[[Sequence[str]], Sequence[Sequence[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFeatures:
    """What clustering needs of a trace, so that not all of them are in memory."""

    id: str
    tag: str
    features: Mapping[str, int]
    text: str = ""  # for an embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Traces that are alike."""

    ids: tuple[str, ...]  # the leader first
    tags: tuple[tuple[str, int], ...]  # with how many of its traces, the most frequent first
    about: tuple[str, ...]  # the features that most of it share and few others have


def trace_features(trace: Trace, text: str = "") -> TraceFeatures:
    return TraceFeatures(id=trace.id, tag=deciding_tag_name(trace.tags), features=extract_features(trace), text=text)


def cluster_traces(traces: Iterable[TraceFeatures], *, alike: float = MIN_SIMILARITY, embed: Embedding | None = None) -> list[Cluster]:
    """Clusters, the largest first. Each trace is in one."""
    some = list(traces)
    weights = _rarity(some)
    vectors = [_unit({hash_of(name): by * weights[name] for name, by in one.features.items()}) for one in some]
    if embed is not None and some:
        vectors = [_unit(dict(enumerate(map(float, row)))) for row in embed([one.text for one in some])]
    members = _by_leaders(_sorts(vectors), vectors, alike)
    found = [_told([some[index] for index in group], weights) for group in members]
    return sorted(found, key=lambda one: (-len(one.ids), one.ids[0]))


def hash_of(name: str) -> int:
    """The place of a feature in a vector, in every process alike."""
    return zlib.crc32(name.encode("utf-8", "replace"))


def _rarity(some: Sequence[TraceFeatures]) -> dict[str, float]:
    """Smoothed inverse document frequency."""
    documents = Counter(name for one in some for name in one.features)
    return {name: math.log((1 + len(some)) / (1 + times)) + 1.0 for name, times in documents.items()}


def _unit(vector: dict[int, float]) -> Vector:
    length = math.sqrt(sum(value * value for value in vector.values()))
    return {key: value / length for key, value in vector.items() if value} if length else {}


def _sorts(vectors: Sequence[Vector]) -> list[list[int]]:
    """Indices of equal vectors together, the commonest first: most failures of a run repeat each other to the letter."""
    groups: dict[tuple[tuple[int, float], ...], list[int]] = defaultdict(list)
    for index, vector in enumerate(vectors):
        groups[tuple(sorted(vector.items()))].append(index)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0]))


def _by_leaders(sorts: Sequence[list[int]], vectors: Sequence[Vector], alike: float) -> list[list[int]]:
    found: list[list[int]] = []
    rest: list[int] = []
    leading: dict[int, list[tuple[int, float]]] = defaultdict(list)  # feature -> (cluster, its leader's value)
    for group in sorts:
        vector = vectors[group[0]]
        near: dict[int, float] = defaultdict(float)
        for key, value in vector.items():
            for cluster, other in leading[key]:
                near[cluster] += value * other
        best = max(near.items(), key=lambda item: (item[1], -item[0]), default=(0, -1.0))
        if best[1] >= alike:
            found[best[0]] += group
        elif len(found) < MOST_CLUSTERS:
            for key, value in vector.items():
                leading[key].append((len(found), value))
            found.append(list(group))
        else:
            rest += group
    return [*found, rest] if rest else found


def _told(some: Sequence[TraceFeatures], weights: Mapping[str, float]) -> Cluster:
    shared = Counter(name for one in some for name in one.features)
    ranked = sorted(shared.items(), key=lambda item: (-item[1] * weights[item[0]], item[0]))
    about = tuple(name for name, times in ranked if 2 * times >= len(some))[:_SHOWN]
    return Cluster(ids=tuple(one.id for one in some), tags=tuple(Counter(one.tag for one in some).most_common()), about=about)
