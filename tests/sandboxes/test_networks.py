"""Sorting networks: the environment's score, its archive, and an independent checker."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import UserError
from sandboxes.networks import SortingNetwork, checker
from sandboxes.networks.archive import MAX_STATES, Archive
from sandboxes.networks.state import Comparator, Outputs, comparators, label, parse

FOUR = [(0, 1), (2, 3), (0, 2), (1, 3), (1, 2)]
CHANNELS = 4


def labels(network: list[Comparator]) -> str:
    return " ".join(map(label, network))


@given(st.lists(st.sampled_from(comparators(CHANNELS)), max_size=9))
def test_the_environment_and_the_checker_agree_on_which_networks_sort(network: list[Comparator]) -> None:
    assert (Outputs.of(CHANNELS, network).unsorted == 0) == (checker.counterexample(network, CHANNELS) is None)


@pytest.mark.parametrize(
    ("channels", "network"), [(3, "1-2 1-3 2-3"), (4, "1-2 3-4 1-3 2-4 2-3"), (5, "1-4 2-5 1-3 2-4 1-2 3-5 2-3 4-5 3-4")]
)
def test_the_smallest_known_networks_sort(channels: int, network: str) -> None:
    pairs = [parse(text, channels) for text in network.split()]
    assert Outputs.of(channels, pairs).unsorted == 0 and len(pairs) == checker.SMALLEST_KNOWN[channels]
    assert Outputs.of(channels, pairs[:-1]).unsorted > 0


def test_an_episode_ends_when_the_network_sorts_and_a_smaller_one_scores_more() -> None:
    environment = SortingNetwork(channels=CHANNELS, budget=8)
    assert environment.reset(0).startswith("start empty unsorted ")
    steps = [environment.step(label(pair)) for pair in FOUR]
    assert [step[2] for step in steps] == [False] * 4 + [True] and steps[-1][0] == "unsorted 0"
    assert steps[-1][4] == {"quality": 1 + 3 / 8, "novelty": 0.0, "comparators": 5.0, "sorts": 1.0} and steps[-1][1] == 1 + 3 / 8
    environment.reset(0)
    wasted = [environment.step("1-2") for _ in range(8)]
    assert wasted[-1][2] and wasted[-1][4]["sorts"] == 0.0 and 0 < wasted[-1][1] < 0.5
    with pytest.raises(ValueError, match="'2-1' is not a comparator of 4 channels"):
        environment.step("2-1")


@pytest.mark.parametrize("options", [{"budget": 0}, {"channels": 1}, {"channels": 11}])
def test_sizes_out_of_range_are_user_errors(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match="must be from 2 to 10, and budget="):
        SortingNetwork(**options)


@pytest.mark.parametrize("name", ["restarts", "novelty"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_restarts_and_novelty_outside_0_to_1_are_user_errors(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{name}={value} .*must be from 0 to 1"):
        SortingNetwork(**{name: value})


def test_restarts_come_from_the_archive_and_new_states_are_rewarded(tmp_path: Path) -> None:
    archive, path = Archive(CHANNELS), tmp_path / "archive.json"
    assert archive.best() is None and archive.draw(random.Random(0), budget=9).network == ()
    assert archive.add([FOUR, FOUR[:2], []]) == 5 and archive.add([FOUR]) == 0
    assert archive.best() == tuple(FOUR) and archive.states[Outputs.of(CHANNELS, FOUR[:1]).key].visits == 3
    archive.save(path)
    assert Archive.load(path).states == archive.states
    environment = SortingNetwork(channels=CHANNELS, budget=8, archive=str(path), restarts=1.0)
    starts = {environment.reset(seed) for seed in range(40)}
    assert starts == {SortingNetwork(channels=CHANNELS, budget=8, archive=str(path), restarts=1.0).reset(seed) for seed in range(40)}
    assert 1 < len(starts) <= 4 and not any("unsorted 0" in start for start in starts)  # no start is a sorted state
    environment = SortingNetwork(channels=CHANNELS, budget=2, archive=str(path), restarts=1.0)
    for seed in range(40):  # a start leaves room for at least one comparator
        environment.reset(seed)
        assert environment.step("1-2")[4]["comparators"] <= 2
    with pytest.raises(UserError, match=f"has {CHANNELS} channels, not channels={CHANNELS + 1}"):
        SortingNetwork(channels=CHANNELS + 1, archive=str(path))
    environment = SortingNetwork(channels=CHANNELS, budget=2, archive=str(path), restarts=0.0)
    environment.reset(0)
    environment.step("1-2")
    assert environment.step("1-4")[4]["novelty"] == 0.5


def test_a_longer_network_to_a_known_state_does_not_replace_the_shorter_one() -> None:
    archive = Archive(CHANNELS)
    archive.add([[(0, 1), (0, 1), (2, 3)], [(2, 3), (0, 1)]])
    assert archive.states[Outputs.of(CHANNELS, FOUR[:2]).key].network == ((2, 3), (0, 1))


@pytest.mark.slow
def test_an_archive_stays_within_its_bound() -> None:
    generator, archive = random.Random(0), Archive(8)
    pairs = comparators(8)
    for _ in range(20):
        archive.add([[generator.choice(pairs) for _ in range(30)] for _ in range(20)])
    assert len(archive.states) <= MAX_STATES


@pytest.mark.parametrize("text", ["[]", '{"channels": 4}', '{"channels": 4, "states": {"a": {"network": ["9-9"]}}}', "not json"])
def test_a_damaged_archive_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "archive.json").write_text(text)
    with pytest.raises(ValueError):
        Archive.load(tmp_path / "archive.json")


def test_the_checker_prints_a_counterexample_and_fails() -> None:
    def check(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, checker.__file__, *arguments], capture_output=True, text=True, check=False)

    assert check(labels(FOUR)).stdout == "sorts 4 channels with 5 comparators; the smallest known network has 5\n"
    wrong = check(labels(FOUR[:-1]))
    assert wrong.returncode == 1 and wrong.stdout.startswith("does not sort: inputs ")
    assert check("1-1").returncode == check("x").returncode == check("1-12").returncode == 2
    imports = [line for line in Path(checker.__file__).read_text().splitlines() if line.startswith(("import ", "from "))]
    assert imports == ["from __future__ import annotations", "import itertools", "import sys"], "it imports no environment"


def test_the_archive_is_plain_json(tmp_path: Path) -> None:
    archive = Archive(CHANNELS)
    archive.add([FOUR[:1]])
    archive.save(tmp_path / "archive.json")
    key = Outputs.of(CHANNELS, FOUR[:1]).key
    assert json.loads((tmp_path / "archive.json").read_text()) == {
        "channels": 4,
        "states": {key: {"network": ["1-2"], "unsorted": Outputs.of(CHANNELS, FOUR[:1]).unsorted, "visits": 1}},
    }
