"""Every record that can be created can be written to every file that stores it, and is read back equal."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl import records
from agentrl.agent.tools import ToolOutcome
from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.experience import FolderCheckpoints, SqliteStore
from agentrl.experience.residuals import split_group
from agentrl.failure.faults import Quarantine, count_quarantined
from agentrl.learner.driver_reports import UpdateFailureLog
from agentrl.learner.update_guard import FailureCounts, UpdateFailure
from agentrl.observe import RunTracker, write_report
from agentrl.observe.report_data import read_run
from agentrl.records import Blame, EpisodeState, Failure, Group, PolicyVersion, ScoredEpisode, Task, VersionState, codec
from agentrl.records.fields import Record
from agentrl.rollout.group import excluded_group
from agentrl.session import measure
from agentrl.session.transcript import append_transcripts, transcript
from agentrl.version import FolderRegistry
from tests import strategies
from tests.strategies import anything, numbers, utf8_text

KINDS = [kind for kind in vars(records).values() if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record]
KINDS += [ToolOutcome, UpdateFailure, FailureCounts]
drawn = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    deadline=None,
    max_examples=strategies.examples(25),
)


def same(decoded: Any, original: Any) -> bool:
    """Returns whether both are equal, with NaN equal to NaN."""
    return repr(decoded) == repr(original) and (decoded == original or "nan" in repr(original))


def test_every_dataclass_of_the_records_is_checked() -> None:
    assert {kind.__name__ for kind in KINDS} >= {
        name for name, kind in vars(records).items() if dataclasses.is_dataclass(kind) and kind.__module__ == records.__name__
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@drawn
def test_a_record_is_read_back_equal(kind: type[Any], data: st.DataObject) -> None:
    read_back(kind, data)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@drawn
def test_a_field_with_any_value_can_be_stored_or_raises(kind: type[Any], data: st.DataObject) -> None:
    raises_or_read_back(kind, data)


@pytest.mark.slow
@given(kind=st.sampled_from(KINDS), data=st.data())
@settings(drawn, max_examples=1000)
def test_many_records_of_all_kinds(kind: type[Any], data: st.DataObject) -> None:
    read_back(kind, data)
    raises_or_read_back(kind, data)


def read_back(kind: type[Any], data: st.DataObject) -> None:
    record = data.draw(strategies.records(kind))
    assert same(codec.from_json(kind, codec.to_json(record)), record)
    json.dumps(codec.to_data(record)).encode()


def raises_or_read_back(kind: type[Any], data: st.DataObject) -> None:
    """Gives a field of a record an arbitrary value, which must raise or be read back equal."""
    record = data.draw(strategies.records(kind))
    field = data.draw(st.sampled_from(dataclasses.fields(kind)))
    try:
        changed = dataclasses.replace(record, **{field.name: data.draw(anything)})
    except ValueError as error:
        str(error).encode()
        assert len(str(error)) < 1000
        return
    assert same(codec.from_json(kind, codec.to_json(changed)), changed)


groups = strategies.records(Group).filter(lambda group: group.index >= 0)


@pytest.mark.slow
@given(groups)
@drawn
def test_groups_are_read_back_from_the_store(group: Group) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "experience.sqlite")
        try:
            assert store.put(group) and not store.put(group)
            parts = split_group(group)  # with residual parts there are two
            assert all(same(store.groups([part.index])[0], part) for part in parts)
        finally:
            store.close()


@pytest.mark.slow
@given(strategies.records(EpisodeState) | strategies.records(ScoredEpisode))
@drawn
def test_running_episodes_are_read_back_equal(record: EpisodeState | ScoredEpisode) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = FolderCheckpoints(Path(folder))
        saving = checkpoints.save_state(1, 2, record) if isinstance(record, EpisodeState) else checkpoints.save_scored(1, 2, record)
        asyncio.run(_awaited(saving))
        assert same(asyncio.run(_awaited(checkpoints.load(1, 2))), record)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


@given(strategies.records(Task), strategies.records(ScoredEpisode))
@drawn
def test_every_episode_is_in_the_transcripts_and_the_report(task: Task, scored: ScoredEpisode) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for phase in ("before", "after", "train"):
            append_transcripts(folder / "episodes" / f"{phase}.jsonl", [transcript(task, scored, phase=phase, step=0)] * 2)
        run = read_run(folder)
        assert not [note for note in run.notes if "unreadable" in note]
        shown = run.episodes["train"][0]
        trajectories = scored.episode.trajectories
        prompt = (trajectories[0].prompt if trajectories else ()) or task.prompt
        assert [message["content"] for message in shown["messages"]][: len(prompt)] == [message.content for message in prompt]
        assert shown["answer"] == scored.episode.answer
        write_report(folder).read_text(encoding="utf-8")


@given(strategies.records(Failure), utf8_text, utf8_text)
@drawn
def test_a_quarantined_task_is_known_after_a_resume(failure: Failure, task_id: str, task_key: str) -> None:
    fault = dataclasses.replace(failure, blame=Blame.TASK)
    with tempfile.TemporaryDirectory() as name:
        Quarantine(Path(name)).add(excluded_group(3, task_id, task_key, fault, size=2))
        known = Quarantine(Path(name)).known_fault(task_key)
        assert known is not None and known.message == fault.message and count_quarantined(Path(name)) == 1


@given(strategies.records(PolicyVersion), st.dictionaries(utf8_text, numbers.filter(lambda value: value == value), max_size=3))
@drawn
def test_versions_are_read_back_from_the_registry(version: PolicyVersion, evals: Mapping[str, float]) -> None:
    number = abs(version.number) % 10**6
    version = dataclasses.replace(version, number=number, folder=f"versions/{number:06d}", state=VersionState.CANDIDATE)
    with tempfile.TemporaryDirectory() as name:
        registry = FolderRegistry(Path(name) / "versions")
        registry.add(version)
        registry.set_evals(version.number, evals)
        assert same(registry.get(version.number), dataclasses.replace(version, evals={**version.evals, **evals}))


@given(st.lists(strategies.records(UpdateFailure), min_size=1, max_size=3).map(tuple))
@drawn
def test_update_failures_are_read_back_and_reported(failures: tuple[UpdateFailure, ...]) -> None:
    failures = tuple(dataclasses.replace(failure, action="skip", step=abs(failure.step) >> 1) for failure in failures)
    with tempfile.TemporaryDirectory() as name:
        log = UpdateFailureLog(Path(name))
        log.append(failures)
        assert same(log.read(), failures)
        assert len(measure.step_alerts(Path(name), failures[0].step)) >= 1
        write_report(Path(name))


def test_a_step_without_a_finite_metric_is_summarized() -> None:
    with tempfile.TemporaryDirectory() as name:
        tracker = RunTracker(Path(name))
        for step, figure in enumerate((float("inf"), 2.0)):
            tracker.log(step, {"reward_mean": figure, "swap_stall_ms": figure, "swap_probe_max_abs_diff": figure, "episodes": figure})
        tracker.close()
        recipe = Recipe(name="r", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))
        summary = measure.summarize(Path(name), recipe, {}, backend="docker", interrupted=False)
        assert (summary.episodes, summary.swap_stall_ms_p50, summary.swap_probe_max_abs_diff) == (2, 2.0, 2.0)


METRICS = ("reward_mean", "episodes", "tokens_trained", "swap_stall_ms", "swap_probe_max_abs_diff", "loss", "heldout", "ratio_max")


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # TensorBoard keeps float32
@given(st.lists(st.dictionaries(st.sampled_from(METRICS) | utf8_text, numbers, max_size=5), min_size=1, max_size=3))
@drawn
def test_metrics_of_any_size_are_summarized_and_reported(steps: list[dict[str, float]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        tracker = RunTracker(Path(name), steps=len(steps))
        for step, metrics in enumerate(steps):
            tracker.log(step, metrics)
        tracker.close()
        assert len(read_run(Path(name)).metrics.steps) == len(steps)
        write_report(Path(name))
