"""Every target handles its seeds and mutations of them."""

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


def noise(data: bytes, max_size: int) -> bytes:
    """Replaces the mutations of libFuzzer, which only run inside libFuzzer."""
    chance = Random(data)
    return bytes(byte ^ (1 << chance.randrange(8)) if chance.random() < 0.02 else byte for byte in data)[:max_size]


@pytest.mark.parametrize("name", NAMES)
def test_a_target_handles_its_seeds_and_mutations_of_them(name: str, tmp_path: Path) -> None:
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
def test_mutations_respect_the_maximum_size(name: str) -> None:
    target = find(name)
    change = mutator(target, noise)
    for number, seed in enumerate(target.seeds()):
        assert len(change(seed, 50, number)) <= 50


ANY = [mutators.json_text, mutators.toml, mutators.lines, mutators.tar, mutators.frames, mutators.safetensors, mutators.swell]


@given(data=st.binary(max_size=600), seed=st.integers(0, 1 << 32), mutate=st.sampled_from([*ANY, mutators.json_in(b"<", b">")]))
def test_a_mutator_accepts_any_bytes(data: bytes, seed: int, mutate: mutators.Mutator) -> None:
    assert isinstance(mutate(data, Random(seed)), bytes)


@given(st.integers(0, 1 << 32))
def test_a_mutated_archive_header_has_a_valid_checksum(seed: int) -> None:
    """Otherwise every archive would fail the first check."""
    import tarfile

    mutated = mutators.tar(mutators.archive([("a", b"0", b"x")]), Random(seed))
    if mutated[257:262] == b"ustar" and mutated[:512] != bytes(512):
        assert int(mutated[148:156].rstrip(b"\0 "), 8) in tarfile.calc_chksums(mutated[:512])  # type: ignore[attr-defined]


def test_a_labelled_input_keeps_its_label() -> None:
    change = mutators.labelled({"one": None, "two": mutators.lines})
    labels = [mutators.split(change(b"two\na\nb\nc", Random(seed)))[0] for seed in range(500)]
    assert set(labels) == {"one", "two"} and labels.count("two") > 450
