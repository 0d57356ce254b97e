"""The base class of user-supplied environments, and functions that convert the results of their methods."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentrl.base.media import NUMPY, InvalidImage, is_pixels, number_text, read_array
from agentrl.errors import EnvironmentFault
from agentrl.records import Observation, Step, ToolCall
from agentrl.records.environment import PASS_THRESHOLD
from agentrl.records.images import MARK, MAX_IMAGE_BYTES, MAX_IMAGES, REFERENCE, image_text

MAX_OBSERVATION_CHARS = 1 << 20
"""Maximum length of an observation, in characters, without its images. A longer observation is a fault of the environment."""
MAX_PARTS = 64
NOTES = "[agentrl.notes]"
"""This marker in an observation is replaced by the notes from this and earlier episodes, or by `no notes` if there are none."""
NEWEST_NOTE = "[agentrl.note]"
"""Like `NOTES`, but replaced by the text of the newest note."""
MAX_NUMBERS = 4096
"""Maximum number of values in an npy file that does not contain pixels. The values are shown as text."""


class Environment(abc.ABC):
    """Base class of user-supplied environments. An instance serves one episode, in a process that may run other episodes too.

    class Guess(Environment):
        instructions = "Guess the number."
        actions = ("1", "2", "3")

        def reset(self, seed):
            self.secret = random.Random(seed).choice(self.actions)
            return "Which number?"

        def step(self, action):
            return "Right." if action == self.secret else "Wrong.", float(action == self.secret), True

    The arguments of the class come from the options in the recipe. Methods may be async. Two methods are optional: `snapshot(self)` returns
    the state as bytes, and `restore(self, state)` restores that state and returns the last observation before the snapshot. If the class
    has a class method `expert(cls, observation)` that returns an action, `agentrl check` uses it.
    """

    instructions: str = ""  # the agent's system message; empty means none
    actions: Sequence[str] | Sequence[dict[str, Any]] | None = None  # None: any text; strings: one of these; function schemas: tool calls
    rewards: ClassVar[tuple[float, float] | None] = None  # smallest and largest total reward of an episode; None means unknown
    pass_threshold: ClassVar[float | None] = PASS_THRESHOLD  # minimum total reward of a passing episode; None means no threshold

    @abc.abstractmethod
    def reset(self, seed: int) -> Any:
        """Starts the episode. Returns what the agent sees first: text, or an `Observation`."""

    @abc.abstractmethod
    def step(self, action: Any) -> Any:
        """Applies an action: a string, or a `ToolCall` if `actions` are function schemas.

        Returns a `Step`, or a tuple (observation, reward, terminated). The tuple may have two more values: truncated, and a dictionary with
        named parts of the reward. Raises `PolicyFault` if the rules forbid the action. The agent then sees the message, and the episode
        continues.
        """

    def close(self) -> Any:
        """Frees the resources of the episode."""
        return None


StepRow = tuple[str, float, bool, bool, dict[str, float], str]
"""A step as JSON data: the observation's text, the reward, the flags terminated and truncated, the parts of the reward, and a note."""


def text_of(value: Any, where: str) -> str:
    """Returns the text of an observation. The observation's images and arrays of numbers are converted to text (see
    `agentrl.records.images`).

    Raises `EnvironmentFault` if the value is neither text nor an `Observation`, or if its text or media exceed the limits or are invalid.
    """
    text = value.text if isinstance(value, Observation) else value
    if not isinstance(text, str):
        raise EnvironmentFault(f"{where} returned {type(text).__name__} instead of a string or an Observation")
    if isinstance(value, Observation) and value.media:
        if len(value.media) > MAX_IMAGES:
            raise EnvironmentFault(f"{where} returned {len(value.media)} media items; at most {MAX_IMAGES} are allowed")
        text = "\n".join((*([text] if text else []), *(media_text(content, where) for content in value.media)))
    if len(text) > MAX_OBSERVATION_CHARS:
        visible = REFERENCE.sub("", text) if MARK in text and len(text) <= MAX_IMAGES * 3 * MAX_IMAGE_BYTES // 2 else text
        if len(visible) > MAX_OBSERVATION_CHARS:
            raise EnvironmentFault(
                f"{where} returned an observation of {len(visible)} characters; at most {MAX_OBSERVATION_CHARS} are allowed"
            )
    return text


def media_text(content: bytes, where: str) -> str:
    """Returns the text that represents an image, or the exact numbers in an npy file without pixels. Raises `EnvironmentFault` if the
    content is too large, or if an npy file is invalid, empty or has more than `MAX_NUMBERS` numbers. Other content is not checked."""
    if len(content) > MAX_IMAGE_BYTES:
        raise EnvironmentFault(f"{where} returned a media item of {len(content)} bytes; at most {MAX_IMAGE_BYTES} are allowed")
    if not content.startswith(NUMPY):
        return image_text(content)
    try:
        array = read_array(content)
    except InvalidImage as error:
        raise EnvironmentFault(f"{where} returned invalid media: {error}") from error
    if is_pixels(array):
        return image_text(content)
    if not 0 < array.size <= MAX_NUMBERS:  # an array of size 0 can have any number of empty rows
        raise EnvironmentFault(f"{where} returned an array of {array.size} numbers; 1 to {MAX_NUMBERS} are allowed")
    return number_text(array)


def step_row(value: Any, where: str) -> StepRow:
    """Converts the result of `step`, a `Step` or a tuple of 3 to 5 values, to a `StepRow`. Raises `EnvironmentFault` for a value of a
    different form."""
    if isinstance(value, Step):
        note = text_of(value.note, where)
        return text_of(value.observation, where), value.reward, value.terminated, value.truncated, dict(value.parts), note
    if not isinstance(value, tuple) or not 3 <= len(value) <= 5:
        size = f" of {len(value)} values" if isinstance(value, tuple) else ""
        raise EnvironmentFault(f"{where} returned a {type(value).__name__}{size} instead of (observation, reward, terminated)")
    observation, reward, terminated, *more = value
    truncated, parts = more[0] if more else False, more[1] if len(more) > 1 else {}
    return (
        text_of(observation, where),
        number_of(reward, where, "reward"),
        flag_of(terminated, where, "terminated"),
        flag_of(truncated, where, "truncated"),
        _parts(parts, where) if parts or not isinstance(parts, dict) else {},
        "",
    )


def number_of(value: Any, where: str, what: str) -> float:
    """Returns a number from an environment as a finite float. Raises `EnvironmentFault` if the value is not a finite number."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise EnvironmentFault(f"{where} returned a {what} of type {type(value).__name__} instead of a number") from None
    if not math.isfinite(number):
        raise EnvironmentFault(f"{where} returned the {what} {number}, which is not finite")
    return number


def flag_of(value: Any, where: str, what: str) -> bool:
    """Converts a boolean or a numpy boolean from an environment to a `bool`. Raises `EnvironmentFault` for a value of any other type."""
    if value is True or value is False:
        return value
    if type(value).__name__ in ("bool", "bool_") and type(value).__module__ == "numpy":
        return bool(value)
    raise EnvironmentFault(f"{where} returned {what} of type {type(value).__name__} instead of True or False")


def _parts(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, Mapping) or len(value) > MAX_PARTS:
        raise EnvironmentFault(f"{where} returned parts that are not a dictionary of at most {MAX_PARTS} numbers")
    return {str(name)[:80]: number_of(number, where, f"part {str(name)[:40]!r}") for name, number in value.items()}


def actions_of(value: Any, where: str) -> tuple[str, ...] | tuple[dict[str, Any], ...] | None:
    """Returns the actions that an environment declares. Raises `EnvironmentFault` unless they are None, different non-empty
    strings, or function schemas with a name and parameters."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise EnvironmentFault(f"{where}: actions must be None or a non-empty sequence of strings or function schemas")
    items = tuple(value)
    if all(isinstance(item, str) and item for item in items):
        if len(set(items)) < len(items):
            raise EnvironmentFault(f"{where}: actions contains the same string twice")
        return items
    for item in items:
        function = item.get("function") if isinstance(item, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters"), Mapping):
            raise EnvironmentFault(f"{where}: an action is neither a string nor a function schema with a name and parameters")
    return items


def call_of(action: Any) -> str | ToolCall:
    """Converts an action that was sent as JSON to a string or a `ToolCall`."""
    return action if isinstance(action, str) else ToolCall(name=action["name"], arguments=action["arguments"])
