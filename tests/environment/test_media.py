"""Observations with images and numbers arrive exactly as the environment returned them, from another process or this one, or are faults."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from agentrl.base.media import normalized_image, open_png
from agentrl.environment import Environment, close_environments, open_environment
from agentrl.environment.base import MAX_NUMBERS, MAX_OBSERVATION_CHARS, text_of
from agentrl.errors import EnvironmentFault
from agentrl.records import EnvironmentSpec, Observation, Step
from agentrl.records.images import MARK, MAX_IMAGE_BYTES, MAX_IMAGES, REFERENCE, image_text

REF = "tests.environment.test_media:"
PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)


def npy(array: Any) -> bytes:
    np.save(file := io.BytesIO(), array)
    return file.getvalue()


class Shows(Environment):
    """Shows an image first, then as many numbers as it has steps."""

    def reset(self, seed: int) -> Observation:
        self.steps = 0
        return Observation(text="look", media=(npy(PIXELS),))

    def step(self, action: str) -> Step:
        self.steps += 1
        return Step(observation=Observation(text="", media=(npy(np.ones(self.steps) / 3),)))


class Opened:
    """The same environment in this process."""

    instructions, actions = "", None

    def __init__(self) -> None:
        self.shows = Shows()

    async def reset(self) -> Observation:
        return self.shows.reset(0)

    async def step(self, action: str) -> Step:
        return self.shows.step(action)

    async def close(self) -> None:
        return None


class Opener:
    async def open(self, spec: EnvironmentSpec) -> Opened:
        return Opened()

    async def close(self) -> None:
        return None


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await close_environments()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Shows", "Opener"])
async def test_images_and_numbers_arrive_exactly(name: str) -> None:
    environment = await open_environment(EnvironmentSpec(ref=REF + name))
    first = (await environment.reset()).text
    assert first == f"look\n{image_text(npy(PIXELS))}"
    assert (np.asarray(open_png(normalized_image(npy(PIXELS)))) == PIXELS).all()
    for count in (1, 2, 3):
        text = (await environment.step("")).observation.text
        assert text == str([1 / 3] * count)
    await environment.close()


BAD: dict[str, tuple[bytes, ...]] = {
    "large": (bytes(MAX_IMAGE_BYTES + 1),),
    "numbers": (npy(np.zeros(MAX_NUMBERS + 1)),),
    "pickle": (b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",),
    "empty": (npy(np.zeros((3, 0))),),
    "text": (npy(np.array(["a"])),),
    "many": (b"\x89PNG" * (1 << 20),) * (2 * MAX_IMAGES),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_media_is_a_fault_of_the_environment(name: str) -> None:
    with pytest.raises(EnvironmentFault, match="reset"):
        text_of(Observation(text="", media=BAD[name]), "reset()")


def test_only_images_may_be_long() -> None:
    with pytest.raises(EnvironmentFault, match="characters"):
        text_of("a" * (MAX_OBSERVATION_CHARS + 1), "reset()")
    long = text_of(Observation(text="a", media=(bytes(MAX_IMAGE_BYTES),)), "reset()")
    assert len(long) > MAX_OBSERVATION_CHARS and REFERENCE.search(long)


def test_a_mark_does_not_make_a_text_long() -> None:
    for text in (f"{MARK}{'a' * MAX_OBSERVATION_CHARS}", f"{image_text(bytes(9))}{'a' * (MAX_OBSERVATION_CHARS + 1)}"):
        with pytest.raises(EnvironmentFault, match="characters"):
            text_of(text, "reset()")


def test_no_media_are_dropped() -> None:
    assert text_of(Observation(text="", media=(npy(np.array(7)),) * MAX_IMAGES), "reset()").split() == ["7"] * MAX_IMAGES
    with pytest.raises(EnvironmentFault, match="9 media"):
        text_of(Observation(text="", media=(npy(np.array(7)),) * (MAX_IMAGES + 1)), "reset()")
