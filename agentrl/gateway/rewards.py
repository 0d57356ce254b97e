"""PostedRewards that the host's side posts to a session: what an outside world, a game or a person says of an episode, as its score.

The recipe's agent gets `reward_key_file`, and writes a key there that only its user can read. Who has it posts, while the program
runs or within `WAIT_S` seconds of its end:

    POST /sessions/ID/reward   {"value": 0.5, "parts": {"speed": 1.0}, "evidence": "won in 12 moves"}

A task that names the verifier `agentrl.gateway:posted_reward` is scored by it. A session's own key cannot post: no agent rewards itself.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections import OrderedDict
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.gateway.checks import known_fields, mapping, text
from agentrl.gateway.request import RequestError
from agentrl.records import Episode, Score, Task

WAIT_S = 20.0
"""How long after the end of its program a session waits for its reward; without one it has no score, which is not 0."""
REMEMBERED = 4096
MAX_PARTS = 64
MAX_EVIDENCE = 10_000
_LARGEST = 1e300


class PostedRewards:
    """PostedRewards by session, of the newest `REMEMBERED` sessions: those that were posted, and places for those that may be."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, asyncio.Future[Score]] = OrderedDict()
        self._keys: set[bytes] = set()

    def make_key(self, path: str) -> None:
        """Writes a new key into a file that only this user can read. Raises `UserError`."""
        key = f"sk-agentrl-host-{secrets.token_urlsafe(32)}"
        new = Path(f"{path}.new")
        try:
            new.unlink(missing_ok=True)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(key + "\n")
            new.replace(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"rollout.agent_options.reward_key_file: {path}: {reason}", fix="name a file that can be written") from None
        self._keys.add(key.encode())

    def open(self, session: str) -> None:
        """A session that a reward may be posted to from now on."""
        self._places[session] = asyncio.get_running_loop().create_future()
        while len(self._places) > REMEMBERED:
            self._places.popitem(last=False)

    def check_key(self, key: str) -> None:
        """Raises `RequestError` for a key that is not the host's."""
        if not any(hmac.compare_digest(key.encode("utf-8", "replace"), known) for known in self._keys):
            raise RequestError("wrong_key", "Incorrect API key provided.")

    def post(self, session: str, body: Any) -> None:
        """Takes one reward for a session. Raises `RequestError` for one that is none, for a second one, or for a session that is not
        known."""
        asked = known_fields(body, ("value", "parts", "evidence"))
        parts = mapping(asked.get("parts") or {}, "parts")
        if len(parts) > MAX_PARTS:
            raise RequestError("invalid", f"parts has {len(parts)} entries; at most {MAX_PARTS} are taken.", param="parts")
        evidence = text(asked.get("evidence") or "", "evidence")[:MAX_EVIDENCE]
        numbers = {name: _number(value, f"parts.{name}"[:100]) for name, value in parts.items()}
        try:
            score = Score(value=_number(asked.get("value"), "value"), parts=numbers, evidence=evidence)
        except ValueError as error:
            raise RequestError("invalid", str(error)[:300]) from None
        place = self._places.get(session)
        if place is None:
            raise RequestError("not_found", f"There is no session {session[:100]!a}.")
        if place.done():
            raise RequestError("invalid", "This session has its reward already.")
        place.set_result(score)

    async def wait(self, session: str) -> None:
        """Returns once a session that was opened has its reward, or after `WAIT_S` seconds."""
        await asyncio.wait({self._places[session]}, timeout=WAIT_S)

    def of(self, session: str) -> Score:
        """The reward of a session; without one, no score."""
        place = self._places.get(session)
        if place is None:
            return Score(value=None, reason="no session of this id takes rewards: give the agent a reward_key_file")
        return place.result() if place.done() else Score(value=None, reason="no reward was posted to this session")


POSTED_REWARDS = PostedRewards()
"""Those of this process: the gateway takes them, and the verifier has nothing but the episode's id to find one by."""


async def posted_reward(task: Task, episode: Episode) -> Score:
    """A verifier: what was posted to the episode's session."""
    return POSTED_REWARDS.of(episode.id)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        raise RequestError("invalid", f"{where} must be a finite number.", param=where)
    return float(value)
