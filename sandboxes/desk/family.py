"""`Desk`: customers with requests. The rules of the shop forbid some requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from agentrl.environment.dialogue import POLICY
from agentrl.errors import UserError
from agentrl.plugins.references import resolve
from agentrl.records import EnvironmentSpec, Limits, Split, Task
from sandboxes.desk.customer import BUTTONS
from sandboxes.desk.shop import BROKEN_DAYS, DELIVERED, PLACED, REFUND_DAYS, RULES, SHIPPED, forbidden

KINDS = ("refund", "late_refund", "broken", "late_broken", "cancel", "late_cancel", "move", "late_move", "stranger")
"""The kinds of requests. Late requests are forbidden, and a stranger does not know the order's e-mail address."""
_REQUESTS = {"refund": "refund", "broken": "refund", "cancel": "cancel", "move": "change_address", "stranger": "refund"}
_ITEMS = ("lamp", "kettle", "desk", "radio", "tent", "drill", "clock", "chair", "bicycle pump", "toaster")
_NAMES = ("ana", "ben", "carla", "dev", "ella", "farid", "gina", "hugo", "ines", "jon", "kira", "leo", "mina", "nils", "olga", "pia")
_STREETS = ("Mill", "Lake", "Station", "Church", "Park", "Hill", "River", "Market")


class Desk:
    """Conversations with a customer of a shop, who wants a refund, a cancellation or a different address.

    The agent calls the functions of `sandboxes.desk.shop:Shop`, or presses the buttons of `sandboxes.desk.customer` (`buttons=True`).
    `task` is a pure function of (seed, split, index). Each task has its own seed for the customer and the orders. The seeds of the splits
    differ.

    Args:
        user: reference of the customer, or `policy`; see `agentrl.environment.dialogue`.
        train_user: whether to train a customer that the policy plays. Such a customer learns to have its request fulfilled, whether or not
            the rules allow it. Requires `objective.credit=verifier`.
        kinds: kinds of requests from `KINDS`.
        buttons: whether the agent chooses from a list of messages and actions, for small policies.
        turns: maximum number of turns.
        turn_tokens: maximum number of tokens in a turn.
        episode_tokens: maximum number of tokens in a conversation.

    Raises `UserError` for invalid options.
    """

    name = "desk"

    def __init__(
        self,
        seed: int = 0,
        *,
        user: str = "sandboxes.desk.customer:customer",
        train_user: bool = False,
        kinds: Sequence[str] = KINDS,
        buttons: bool = False,
        turns: int = 16,
        turn_tokens: int = 256,
        episode_tokens: int = 4096,
    ) -> None:
        if not kinds or not set(kinds) <= set(KINDS) or min(turns, turn_tokens, episode_tokens) < 1:
            raise UserError(
                f"desk cannot have kinds={list(kinds)}, turns={turns}, turn_tokens={turn_tokens}, episode_tokens={episode_tokens}",
                fix=f"use kinds from {', '.join(KINDS)}, and at least 1 turn and 1 token",
            )
        if user != POLICY:
            resolve(user)  # raises an error if the reference is invalid
            if train_user:
                raise UserError(f"train_user has no effect with user={user}: only the policy can be trained", fix=f"set user={POLICY}")
        self.seed, self.kinds, self._user, self._buttons = seed, tuple(kinds), {"user": user, "train_user": train_user}, buttons
        self._limits = Limits(turns=turns, turn_tokens=turn_tokens, episode_tokens=episode_tokens, all_tokens=4 * episode_tokens)

    def size(self, split: Split) -> int | None:
        """Returns None, which means infinite, or 0 for the split of real data."""
        return 0 if split is Split.HELDOUT_REAL else None

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index. Raises `UserError` if the index is negative or the split is that of real data, which is empty."""
        if index < 0 or split is Split.HELDOUT_REAL:
            raise UserError(f"desk has no task {index} in split {split}", fix="use train or heldout, and an index from 0")
        rng = Random(f"desk:{self.seed}:{split}:{index}")
        kind = self.kinds[index % len(self.kinds)]
        orders = _orders(rng)
        number = min(orders, key=lambda each: rng.random())
        request, broken = _REQUESTS[kind.removeprefix("late_")], "broken" in kind
        orders[number] |= _status(kind, rng)
        goal: dict[str, Any] = {"order": number, "request": request, "broken": broken}
        if request == "change_address":
            goal["address"] = f"{rng.randrange(1, 100)} {rng.choice(_STREETS)} Street"
        goal["decline"] = kind == "stranger" or forbidden(request, orders[number], broken=broken)
        email = f"{rng.choice(_NAMES)}{rng.randrange(100)}@example.net" if kind == "stranger" else str(orders[number]["email"])
        goal["email"] = email
        wish = _wish(goal, orders[number])
        address = f"New address: {goal['address']}\n" if "address" in goal else ""
        options = {
            **self._user,
            "brief": f"You want: {wish}\nYour e-mail address: {email}\n{address}",
            "instructions": "" if self._buttons else RULES,
            "opening": wish,
            "backend": "sandboxes.desk.shop:Shop",
            "records": orders,
        }
        if self._buttons:
            options |= {"actions": [*BUTTONS], "translate": "sandboxes.desk.customer:press"}
        return Task(
            id=f"desk-{self.seed}-{split}-{index}",
            family=self.name,
            prompt=(),
            tools=(),
            verifiers=("rewards.desk:desk",),
            data={"kind": kind, "goal": goal},
            split=split,
            limits=self._limits,
            environment=EnvironmentSpec(ref="agentrl.environment.dialogue:Dialogues", options=options, seed=index, resume="snapshot"),
        )


def _orders(rng: Random) -> dict[str, dict[str, Any]]:
    """Returns three orders from different customers."""
    numbers = rng.sample(range(1000, 10_000), 3)
    return {
        str(number): {
            "item": item,
            "email": f"{name}{rng.randrange(100)}@example.org",
            "status": rng.choice((PLACED, SHIPPED, DELIVERED)),
            "days": rng.randrange(1, REFUND_DAYS),
            "address": f"{rng.randrange(1, 100)} {rng.choice(_STREETS)} Street",
        }
        for number, item, name in zip(numbers, rng.sample(_ITEMS, 3), rng.sample(_NAMES, 3), strict=True)
    }


def _status(kind: str, rng: Random) -> dict[str, Any]:
    """Returns a random status of the order for which the customer makes a request of this kind."""
    if kind in ("cancel", "move"):
        return {"status": PLACED}
    if kind == "late_cancel" or kind == "late_move":
        return {"status": SHIPPED}
    days = {"broken": (REFUND_DAYS + 1, BROKEN_DAYS + 1), "late_refund": (REFUND_DAYS + 1, 100), "late_broken": (BROKEN_DAYS + 1, 100)}
    return {"status": DELIVERED, "days": rng.randrange(*days.get(kind, (1, REFUND_DAYS + 1)))}


def _wish(goal: Mapping[str, Any], order: Mapping[str, Any]) -> str:
    """Returns the customer's first message."""
    number, item = goal["order"], order["item"]
    if goal["request"] == "refund":
        return f"Please refund order {number}. The {item} arrived broken." if goal["broken"] else f"Please refund order {number}."
    if goal["request"] == "cancel":
        return f"Please cancel order {number}."
    return f"Please send order {number} to {goal['address']}."
