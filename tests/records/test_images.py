"""Tagged token ids: a context determines its images, and plain ids and blocks survive a round trip."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import Message, Trajectory, Turn, codec
from agentrl.records.images import (
    FIRST,
    MAX_IMAGE_BYTES,
    NAME_DIGITS,
    REFERENCE,
    count_images,
    image_blocks,
    image_ids,
    image_text,
    images_of,
    plain_ids,
    without_cut_image,
    without_end,
)

TOKENS = st.lists(st.integers(0, FIRST - 1), max_size=6)
SHA256 = st.sampled_from([hashlib.sha256(bytes([n])).hexdigest() for n in range(3)])
PIECES = st.lists(st.tuples(TOKENS, SHA256, st.lists(st.integers(0, FIRST - 1), min_size=1, max_size=4)), max_size=4)


@given(PIECES, TOKENS)
def test_ids_and_images_survive_a_round_trip(pieces: list[tuple[list[int], str, list[int]]], end: list[int]) -> None:
    """Including adjacent equal images. The ids fit into a record."""
    context: list[int] = []
    plain: list[int] = []
    blocks = []
    for text, sha256, image in pieces:
        context += text
        blocks.append((len(context), len(context) + len(image), sha256[:NAME_DIGITS]))
        context += image_ids(image, sha256)
        plain += [*text, *image]
    assert plain_ids([*context, *end]) == [*plain, *end]
    assert list(image_blocks([*context, *end])) == blocks
    turn = Turn(
        prompt_ids=tuple(context),
        completion_ids=(),
        logprobs=(),
        versions=(),
        message=Message(role="assistant", content=""),
        finish_reason="stop",
    )
    trajectory = Trajectory(agent="main", turns=(turn,))
    assert codec.from_json(Trajectory, codec.to_json(trajectory)) == trajectory
    assert images_of([trajectory]) == {name for *_, name in blocks}


@given(PIECES, TOKENS, st.integers(0, 60))
def test_the_end_of_a_context_never_starts_inside_an_image(
    pieces: list[tuple[list[int], str, list[int]]], end: list[int], max_tokens: int
) -> None:
    context = [token for text, sha256, image in pieces for token in (*text, *image_ids(image, sha256))] + end
    row = without_cut_image(context[-max_tokens:] if max_tokens else [])
    list(image_blocks(row))
    assert tuple(context[len(context) - len(row) :]) == row
    cut = len(context) - len(row) - 1
    if 0 <= cut >= len(context) - max_tokens:
        with pytest.raises(ValueError, match="start inside image"):
            list(image_blocks(context[cut:]))


@given(PIECES, TOKENS, st.integers(0, 60))
def test_the_start_of_a_context_never_ends_inside_an_image(
    pieces: list[tuple[list[int], str, list[int]]], end: list[int], max_tokens: int
) -> None:
    context = [token for text, sha256, image in pieces for token in (*text, *image_ids(image, sha256))] + end
    row = without_end(context, max_tokens)
    assert tuple(context[: len(row)]) == row and len(row) <= max_tokens
    spans = list(image_blocks(context))
    assert not any(start < len(row) < stop for start, stop, _ in spans)
    assert len(row) == min(max_tokens, len(context)) or any(start == len(row) and stop > max_tokens for start, stop, _ in spans)


def test_a_reference_has_one_form() -> None:
    assert REFERENCE.fullmatch(image_text(b"\x89PNG")).group(2) == "iVBORw=="  # type: ignore[union-attr]
    assert REFERENCE.fullmatch(image_text(bytes(MAX_IMAGE_BYTES))) and not REFERENCE.fullmatch(image_text(bytes(MAX_IMAGE_BYTES + 3)))
    assert REFERENCE.fullmatch(f"<image sha256:{'a' * 64}>")
    for text in ("<image>", "<image sha256:ab>", f"<image sha256:{'A' * 64}>", "<image base64:>", "<image base64:a b>", "<image src='x'>"):
        assert not REFERENCE.search(text), text


def test_images_of_a_context_are_counted() -> None:
    image = image_ids((5, 5, 6), "ab" * 32)
    assert [count_images(ids) for ids in ((), (1, FIRST - 1), image, (*image, 1, *image, *image))] == [0, 0, 1, 3]
