"""Counts the groups and tokens in a run's ledger and verifies the ledger, even while the run is active."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.base.files import has_intact_files, numbered_folders
from agentrl.base.untrusted_files import open_file, read_bytes
from agentrl.config.recipe import load
from agentrl.errors import StoreError
from agentrl.experience.checkpoints import FolderCheckpoints
from agentrl.experience.ledger import GroupOrder, new_entry
from agentrl.experience.step_uses import CONSUMED_FILE, hash_steps, read_steps
from agentrl.protocols import ExperienceStore
from agentrl.records import Group, GroupUse, LedgerEntry

STATES = ("parked", "ready", "assigned", "trained", "excluded")
MAX_PROBLEMS = 100
_MAX_META = 1 << 20  # maximum bytes of a checkpoint's record
_MAX_METRICS = 1 << 30  # maximum bytes of metrics.jsonl
_MAX_LINE = 1 << 20  # maximum bytes of a line in metrics.jsonl; longer lines are skipped
_SHOWN_CHARS = 200  # maximum characters of a value in the description of a problem

Progress = Callable[[int, int], None]
"""Called with the number of processed groups and the total number of groups."""
_CheckpointUses = tuple[int, dict[int, tuple[int, GroupUse]]]  # number of completed steps, and group index -> (step, use)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Counts of a ledger's groups and tokens. `tokens_sampled` is the sum of `tokens_trained`, `tokens_excluded` and `tokens_open`."""

    groups: Mapping[str, int]  # state -> number of groups
    parts_pending: int  # number of score parts that have not arrived
    tokens_sampled: int
    tokens_trained: int
    tokens_excluded: int
    tokens_open: int
    residuals: int  # number of groups whose late parts were applied after the group was trained
    tokens_residual: int  # tokens trained for residuals, which `tokens_trained` does not include
    unused: Mapping[str, int]  # reason without details -> number of excluded groups

    @property
    def tokens(self) -> dict[str, int]:
        """The token counts by name: sampled, trained, excluded and open."""
        sampled, trained, excluded, left = self.tokens_sampled, self.tokens_trained, self.tokens_excluded, self.tokens_open
        return {"sampled": sampled, "trained": trained, "excluded": excluded, "open": left}


def unstored_groups(run_dir: Path, store: ExperienceStore, entries: Iterable[LedgerEntry]) -> dict[int, str]:
    """Returns the states of the groups that have no ledger entry, by index.

    A group is "running" if `running/` contains one of its finished attempts or saved turns, and "issued" if only its block has started.
    """
    order, stored = GroupOrder.from_recipe(load(run_dir / "recipe.json")), {entry.index for entry in entries}
    started = {index for block in store.block_versions() for index in order.block(block)[: order.per_step]}
    running = set(FolderCheckpoints(run_dir / "running").groups())
    return {index: "running" if index in running else "issued" for index in sorted((started | running) - stored)}


def token_balance(tokens: Mapping[str, int]) -> str:
    """Returns the token counts of a ledger (`LedgerCounts.tokens`) as one sentence."""
    return "{sampled:,} tokens sampled = {trained:,} trained + {excluded:,} excluded + {open:,} open".format_map(tokens)


def count(entries: Iterable[LedgerEntry]) -> LedgerCounts:
    """Counts the groups and tokens of ledger entries."""
    groups, unused, tokens, pending = Counter[str](dict.fromkeys(STATES, 0)), Counter[str](), Counter[str](), 0
    for entry in entries:
        pending += entry.pending
        if entry.is_residual:
            groups["residual"] += bool(entry.use and entry.use.tokens_trained)
            tokens["residual"] += 0 if entry.use is None else entry.use.tokens_trained
            continue
        groups[entry.state] += 1
        tokens["sampled"] += entry.tokens_sampled
        tokens["excluded"] += entry.tokens_excluded
        tokens["open"] += entry.tokens_open
        if entry.use is not None:
            tokens["trained"] += entry.use.tokens_trained
            unused.update([entry.use.reason.partition(":")[0].partition(" ")[0]] if entry.use.reason else [])
    return LedgerCounts(
        residuals=groups.pop("residual", 0),
        tokens_residual=tokens["residual"],
        groups=dict(groups),
        parts_pending=pending,
        tokens_sampled=tokens["sampled"],
        tokens_trained=tokens["trained"],
        tokens_excluded=tokens["excluded"],
        tokens_open=tokens["open"],
        unused=dict(unused.most_common()),
    )


def verify(run_dir: Path, store: ExperienceStore, *, progress: Progress = lambda done, total: None) -> Iterator[str]:
    """Yields a description of each inconsistency in the ledger of a run.

    Compares each entry with the group's episodes (if they are stored), all entries with the newest checkpoint, and the trained tokens of
    each step with `metrics.jsonl`. The run may be active during the check. A step that completes during the check is not reported.
    Raises `StoreError` if the ledger cannot be read.
    """
    checkpoint = _newest_checkpoint(run_dir)  # read before the entries, which then contain all of its steps, except perhaps the last
    entries = store.entries()
    for done, entry in enumerate(entries):
        progress(done, len(entries))
        yield from _entry_problems(entry, store)
    if checkpoint is not None:
        yield from _checkpoint_problems(*checkpoint, entries)
    yield from _step_problems(run_dir, entries)
    progress(len(entries), len(entries))


def _entry_problems(entry: LedgerEntry, store: ExperienceStore) -> list[str]:
    if not entry.has_episodes:
        lost = [] if entry.use is not None else [f"group {entry.index}: its episodes were deleted, but no step has used it"]
        return [*lost, *_use_problems(entry)]
    try:
        (group,) = store.groups([entry.index])
        problems = list(_differences(entry, group))
        if problems and entry.pending:  # scores may have arrived since the entry was read
            newer = next(current for current in store.entries(first=entry.index) if current.index == entry.index)
            return _entry_problems(newer, store) if newer.pending < entry.pending else problems
    except StoreError as error:
        return [str(error)]
    return problems


def _differences(entry: LedgerEntry, group: Group) -> Iterator[str]:
    actual, stored = asdict(new_entry(group)), asdict(entry)
    later = ("counted", "has_spread") if entry.pending else ()  # they are computed when the last late part arrives or expires
    for name, value in actual.items():
        if name not in ("step", "use", "late_parts", *later) and stored[name] != value:
            yield f"group {entry.index}: the ledger has {name}={_brief(stored[name])}, but its episodes have {_brief(value)}"
    yield from _use_problems(entry)


def _use_problems(entry: LedgerEntry) -> Iterator[str]:
    if entry.use is not None and not 0 <= entry.use.tokens_trained <= entry.tokens_sampled:
        yield f"group {entry.index}: {entry.use.tokens_trained} tokens were trained, but only {entry.tokens_sampled} were sampled"


def _brief(value: object) -> str:
    return repr(value[:_SHOWN_CHARS] if isinstance(value, str) else value)


def _newest_checkpoint(run_dir: Path) -> tuple[str, _CheckpointUses | str] | None:
    """Returns the name of the newest checkpoint, and the uses recorded in it or the reason why they cannot be read; None if there is no
    checkpoint.

    Skips checkpoints that the learner found damaged. The learner repeats the steps of a damaged checkpoint, so `consumed.jsonl` no longer
    contains these steps.
    """
    unread = None
    metas = [folder / "meta.json" for folder in reversed(numbered_folders(run_dir / "checkpoints"))]
    for meta in filter(Path.exists, metas):
        try:
            return meta.parent.name, _checkpoint_uses(run_dir, read_bytes(meta, most=_MAX_META, inside=run_dir))
        except StoreError as error:
            unread = unread or (meta.parent.name, str(error)[:_SHOWN_CHARS])
            if has_intact_files(meta.parent):
                break
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            return meta.parent.name, str(error)[:_SHOWN_CHARS]
    return unread


def _checkpoint_uses(run_dir: Path, content: bytes) -> _CheckpointUses:
    """Returns the number of steps that are complete in a checkpoint, and for each group the step that used it and its use.

    Raises `StoreError` if `consumed.jsonl` does not match the checkpoint.
    """
    fields = json.loads(content)
    complete, checkpoints = int(fields["step"]), run_dir / "checkpoints"
    steps = read_steps(checkpoints, complete)
    if len(steps) != complete or hash_steps(steps) != fields["consumed_sha256"]:
        raise StoreError(f"{checkpoints / CONSUMED_FILE} does not match the {complete} steps of the checkpoint")
    return complete, {index: (step, use) for step, uses in enumerate(steps) for index, use in uses.items()}


def _checkpoint_problems(name: str, uses: _CheckpointUses | str, entries: Sequence[LedgerEntry]) -> Iterator[str]:
    """Yields the inconsistencies between the newest checkpoint and the ledger.

    A checkpoint decides which groups its steps consumed. The ledger records these groups as consumed after the checkpoint is complete, or
    when the learner resumes.
    """
    if isinstance(uses, str):
        yield f"checkpoint {name} cannot be read: {uses}"
        return
    complete, recorded = uses
    committed = max((entry.step for entry in entries if entry.use is not None and entry.step is not None), default=-1)
    for entry in entries:
        expected = recorded.pop(entry.index, None)
        if entry.use is not None and entry.step is not None and entry.step < complete and (entry.step, entry.use) != expected:
            yield f"group {entry.index}: the ledger and checkpoint {name} differ in how step {entry.step + 1} used it"
        elif entry.use is None and expected is not None and (entry.step != expected[0] or expected[0] <= committed):
            step = expected[0] + 1
            yield f"group {entry.index}: checkpoint {name} records that step {step} consumed it, but the ledger records it as {entry.state}"
    yield from (f"group {index}: step {step + 1} consumed it, but it is not in the store" for index, (step, _) in recorded.items())


def _step_problems(run_dir: Path, entries: Sequence[LedgerEntry]) -> Iterator[str]:
    trained, skipped = Counter[int](), set[int]()
    for entry in entries:
        if entry.use is not None and entry.step is not None:
            trained[entry.step] += 0 if entry.is_residual else entry.use.tokens_trained
            if entry.use.reason in ("update_skipped", "critic_warmup", "rolled_back"):
                skipped.add(entry.step)  # metrics.jsonl contains the tokens of the batch even if its update was skipped
    reported: dict[int, float] = {}  # a resumed run may repeat a step
    try:
        for number, tokens in _reported_tokens(run_dir):
            reported[number - 1] = tokens
    except (OSError, ValueError) as error:
        yield f"metrics.jsonl cannot be read: {str(error)[:_SHOWN_CHARS]}"
        return
    for step, tokens in reported.items():
        if step in trained and step not in skipped and trained[step] != tokens:
            yield f"step {step + 1}: the ledger has {trained[step]} trained tokens, but metrics.jsonl has {tokens:g}"


def _reported_tokens(run_dir: Path) -> Iterator[tuple[int, float]]:
    """Yields the version number and the trained tokens of each line in metrics.jsonl that records a step. Skips other lines."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return
    with open_file(path, inside=run_dir) as file:
        if os.fstat(file.fileno()).st_size > _MAX_METRICS:
            raise ValueError(f"it is larger than {_MAX_METRICS >> 20} MiB")
        for content in iter(lambda: file.readline(_MAX_LINE), b""):
            try:
                line = json.loads(content)
                number, tokens = line["step"], line["tokens_trained"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(number, int) and isinstance(tokens, int | float) and abs(tokens) < 1 << 63:
                yield number, tokens
