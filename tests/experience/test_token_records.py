from __future__ import annotations

import math
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.experience import token_records
from agentrl.experience.token_records import TokenRecord, read_records, write_records

number = st.floats(width=32, allow_nan=False)


@st.composite
def records(draw: st.DrawFn) -> list[TokenRecord]:
    """Samples of several groups and episodes, some without a token."""
    keys = draw(st.lists(st.tuples(st.integers(-3, 3), st.text(max_size=5), st.integers(0, 3)), unique=True, max_size=6))
    drawn = []
    for group, episode, part in keys:
        size = draw(st.integers(0, 5))
        columns = [draw(st.lists(number, min_size=size, max_size=size)) for _ in range(3)]
        flags = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        fields = dict(zip(("logprobs", "entropies", "weights"), (array("f", column) for column in columns), strict=True))
        drawn.append(TokenRecord(group=group, episode_id=episode, part=part, clipped=flags, **fields))
    return drawn


@given(records(), records())
def test_the_records_of_all_ranks_are_read_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, first: list[TokenRecord], second: list[TokenRecord]
) -> None:
    run = tmp_path_factory.mktemp("run")
    write_records(run, 14, 0, first)
    write_records(run, 14, 1, second)
    for group in range(-4, 5):
        assert read_records(run, 14, group) == [record for record in (*first, *second) if record.group == group]
    assert read_records(run, 13, 0) == []


def record(tokens: int = 3) -> TokenRecord:
    column = [0.5] * tokens
    return TokenRecord(
        group=1, episode_id="e", part=0, logprobs=column, entropies=[math.nan] * tokens, weights=column, clipped=[True] * tokens
    )


def test_the_oldest_records_are_removed_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_records(tmp_path, 1, 0, [record()])
    size = (tmp_path / "updates" / "000001.0.tokens").stat().st_size
    monkeypatch.setattr(token_records, "MAX_TOTAL_BYTES", 3 * size)
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        write_records(tmp_path, step, 0, [record()])
    assert {path.name for path in (tmp_path / "updates").iterdir()} == {f"{step}.0.tokens" for step in (999_999, 1_000_000, 1_000_001)}
    assert math.isnan(read_records(tmp_path, 1_000_001, 1)[0].entropies[0])


@pytest.mark.parametrize("damage", ["cut", "header", "counts", "garbage", "link"])
def test_a_damaged_record_is_an_error(tmp_path: Path, damage: str) -> None:
    write_records(tmp_path, 1, 0, [record()])
    path = tmp_path / "updates" / "000001.0.tokens"
    content = token_records.decompress(path.read_bytes())
    changed = {
        "cut": token_records.compress(content[:-1]),
        "header": token_records.compress(b"\xff\xff\xff\xff" + content[4:]),
        "counts": token_records.compress(content.replace(b",3]", b",9]")),
        "garbage": b"\0" * 40,
        "link": b"",
    }[damage]
    path.unlink()
    if damage == "link":
        path.symlink_to("/etc/hostname")
    else:
        path.write_bytes(changed)
    with pytest.raises(ValueError):
        read_records(tmp_path, 1, 1)
