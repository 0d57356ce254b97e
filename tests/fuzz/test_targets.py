"""Every target takes its own seeds and changes of them; every input that once broke one is taken now."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import mutators
from tests.fuzz.catalog import NAMES, find
from tests.fuzz.child import attempt, mutator

CHANGES = 60


def noise(data: bytes, most: int) -> bytes:
    """In place of libFuzzer's own mutations, which only run inside of it."""
    chance = Random(data)
    return bytes(byte ^ (1 << chance.randrange(8)) if chance.random() < 0.02 else byte for byte in data)[:most]


@pytest.mark.parametrize("name", NAMES)
def test_a_target_takes_its_seeds_and_changes_of_them(name: str, tmp_path: Path) -> None:
    target = find(name)
    assert target.name == name
    check, change, seeds = target.prepare(tmp_path), mutator(target, noise), target.seeds()
    for seed in seeds:
        assert attempt(check, seed) is None, seed
    chance = Random(0)
    for number in range(CHANGES):
        data = change(chance.choice(seeds), mutators.LARGEST, number)
        assert attempt(check, data) is None, data


@pytest.mark.parametrize("name", NAMES)
def test_changes_are_of_the_size_allowed(name: str) -> None:
    target = find(name)
    change = mutator(target, noise)
    for number, seed in enumerate(target.seeds()):
        assert len(change(seed, 50, number)) <= 50


ANY = [mutators.json_text, mutators.toml, mutators.lines, mutators.tar, mutators.frames, mutators.safetensors, mutators.swell]


@given(data=st.binary(max_size=600), seed=st.integers(0, 1 << 32), which=st.sampled_from([*ANY, mutators.json_in(b"<", b">")]))
def test_a_mutator_takes_anything(data: bytes, seed: int, which: mutators.Mutator) -> None:
    assert isinstance(which(data, Random(seed)), bytes)


@given(st.integers(0, 1 << 32))
def test_a_changed_header_of_an_archive_has_its_checksum(seed: int) -> None:
    """Else no archive would get past the first check of it."""
    import tarfile

    made = mutators.tar(mutators.archive([("a", b"0", b"x")]), Random(seed))
    if made[257:262] == b"ustar" and made[:512] != bytes(512):
        assert int(made[148:156].rstrip(b"\0 "), 8) in tarfile.calc_chksums(made[:512])  # type: ignore[attr-defined]


def test_a_labelled_input_keeps_its_label() -> None:
    change = mutators.labelled({"one": None, "two": mutators.lines})
    labels = [mutators.split(change(b"two\na\nb\nc", Random(seed)))[0] for seed in range(500)]
    assert set(labels) == {"one", "two"} and labels.count("two") > 450
