"""Samples of episodes for trackers are bounded."""

from __future__ import annotations

from dataclasses import replace

from agentrl.observe.samples import MAX_MESSAGES, sample_of
from agentrl.records import Message
from tests.objective.test_samples import _group, _scored, _turn


def test_a_long_episode_keeps_its_first_messages_and_the_last_within_the_limit() -> None:
    scored = _scored("e", 1.0, [_turn([1], [2])])
    (trajectory,) = scored.episode.trajectories
    for more, omitted in ((0, 0), (1, 2), (100, 101)):
        prompt = tuple(Message(role="user", content=str(number)) for number in range(MAX_MESSAGES - 1 + more))
        episode = replace(scored.episode, trajectories=(replace(trajectory, prompt=prompt),))
        sample = sample_of(_group(0, scored), replace(scored, episode=episode))
        assert len(sample.messages) == MAX_MESSAGES and sample.messages[-1]["role"] == "assistant"
        assert any(message["content"] == f"[{omitted} messages omitted]" for message in sample.messages) == bool(more)
