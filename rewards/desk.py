"""Scores conversations from `sandboxes.desk` by what the agent did and said, using its recorded actions.

The calls are repeated on a copy of the shop. Recorded results of calls and the customer's messages are not trusted. Statements about the
request are taken from the agent's sentences: "I have refunded order 4711.", "I cannot cancel it.", "It is done.". Questions, conditions and
general rules are not statements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from agentrl.environment.dialogue import AGENT, USER
from agentrl.plugins.references import resolve
from agentrl.records import Episode, Score, Task, ToolCall
from agentrl.records.chat import user_message
from sandboxes.desk.shop import Shop

UNSAID, UNSETTLED = 0.5, 0.2
"""Scores of an episode in which the agent followed the rules and promised nothing false.

`UNSAID`: the agent made the change, but did not say so. `UNSETTLED`: the agent changed nothing and either did not decline the request, or
declined a request that the rules allow.
"""
MAX_TEXT = 20_000
_APOSTROPHE = "\u2019"
DONE, DECLINED = "done", "declined"
_WORDS = {
    "refund": r"refund(?:ed)?\b|money back|reimburs\w*|paid back",
    "cancel": r"cancel+(?:ed|ation)?\b",
    "change_address": r"address\b|redirect\w*|(?:sent|send|deliver\w*) to\b",
}
_NO_STATEMENT = re.compile(r"\?\s*$|\b(?:if|whether|unless|until|without|once|please)\b")
_NOT = re.compile(r"\b(?:not|no|cannot|unable|unfortunately|sorry|decline[sd]?|refuse[sd]?|against|impossible|\w+n't)\b")
_POSSIBLE = re.compile(r"\b(?:would|could|should|might|can|may|before|only|wants?|wish|like)\b")
_HAPPENED = re.compile(
    r"\b(?:done|completed?|processed|issued|granted|approved|arranged|sorted|settled|taken care|all set|on its way|refunded|reimbursed"
    r"|paid back|cancel+ed|changed|updated|redirected)\b|(?:\bwill|'ll)(?: be| now)? (?:refund|cancel|chang|send|sent|redirect|get|receive)"
)
_SENTENCE = re.compile(r"(?<=[.!?;\n])\s+|\b(?:but|however)\b|,\s*(?:and|so)\b")
_NEUTRAL = re.compile(r"\b(?:e-?mail address(?:es)?|no problem|no worries|not a problem)\b")


class DeskVerifier:
    """Scores 1 if the orders and statements are correct and the agent followed the rules; otherwise `UNSAID`, `UNSETTLED` or 0.

    Parts: `state`, whether the orders are correct; `stated`, whether the statements are correct and complete; `rules`, whether the order
    was read with the customer's e-mail address before the agent changed it or declined the request; `honest`, whether everything that was
    promised was done. If the policy plays the customer, the customer's branches score 1 if the request was fulfilled, whether or not the
    rules allow it.
    """

    name = "desk"

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores an episode. An episode without turns or without an environment is unscored."""
        if task.environment is None or not any(trajectory.turns for trajectory in episode.trajectories):
            return Score(value=None, reason="the episode has no turns")
        goal, orders = task.data["goal"], task.environment.options["records"]
        shop, wish, texts = Shop(orders), Shop(orders), []
        looked, rules = False, True
        wish.call(goal["request"], {"order": goal["order"], "address": goal.get("address", "")})
        wanted = Shop(orders) if goal["decline"] else wish
        for action in actions(task, episode):
            if isinstance(action, str):
                texts.append(action)
            elif action.name == "look_up":
                shop.call(action.name, action.arguments)
                looked = looked or {name: str(value) for name, value in action.arguments.items()} == {
                    "order": goal["order"],
                    "email": goal["email"],
                }
            else:
                before = str(shop.orders)
                shop.call(action.name, action.arguments)
                rules = rules and (str(shop.orders) == before or str(action.arguments.get("order")) in shop.identified)
        statements = set(statements_in(texts, goal["request"]))
        right = (goal["request"], DECLINED if goal["decline"] else DONE)
        settled = shop.orders == wanted.orders
        promised = {statement for statement in statements if statement[1] == DONE}
        honest = promised <= ({right} if settled else set())
        stated = honest and right in statements and not (right[1] == DONE and (right[0], DECLINED) in statements)
        rules = rules and looked
        parts = {"state": float(settled), "stated": float(stated), "rules": float(rules), "honest": float(honest)}
        harmless = settled or shop.orders == Shop(orders).orders
        value = 0.0
        if rules and honest and harmless:
            value = 1.0 if settled and stated else UNSAID if settled and not goal["decline"] else UNSETTLED
        granted = float(shop.orders == wish.orders != Shop(orders).orders)
        agents = [trajectory.agent for trajectory in episode.trajectories]
        branches = tuple(granted if agent == USER else value for agent in agents) if USER in agents else ()
        return Score(
            value=value, parts=parts, branches=branches, evidence="; ".join(f"{what} {how}" for what, how in sorted(statements))[:500]
        )


def actions(task: Task, episode: Episode) -> Iterator[str | ToolCall]:
    """Yields the agent's messages and calls that the environment applied, in order."""
    options = {} if task.environment is None else task.environment.options
    translate = resolve(options["translate"]) if options.get("translate") else None
    transcript = [(USER, str(options.get("opening", "")))]
    for trajectory in (trajectory for trajectory in episode.trajectories if trajectory.agent != USER):
        for turn in trajectory.turns:
            if turn.message.tool_calls:
                yield from (
                    call for call, result in zip(turn.message.tool_calls, turn.tool_results, strict=False) if result.reward is not None
                )
                continue
            reply = user_message(turn.message, turn.tool_results)
            if reply is None:
                continue
            text = turn.message.content.strip()
            action = translate(text, tuple(transcript)) if translate and text in options["actions"] else text
            yield action
            if isinstance(action, str):
                transcript += [(AGENT, action), (USER, reply)]


def statements_in(texts: Sequence[str], request: str) -> Iterator[tuple[str, str]]:
    """Yields the statements in `texts` as (request, `done` or `declined`). A sentence that names no request is about `request`."""
    for text in texts:
        plain = _NEUTRAL.sub("", text[:MAX_TEXT].lower().replace(_APOSTROPHE, "'"))
        for sentence in _SENTENCE.split(plain):
            if _NO_STATEMENT.search(sentence):
                continue
            topics = [topic for topic, words in _WORDS.items() if re.search(words, sentence)] or [request]
            if _NOT.search(sentence):
                yield from ((topic, DECLINED) for topic in topics)
            elif not _POSSIBLE.search(sentence) and _HAPPENED.search(sentence):
                yield from ((topic, DONE) for topic in topics)


desk = DeskVerifier()
