"""Transcripts of episodes."""

from __future__ import annotations

from agentrl.records import Episode, Message, SandboxSpec, Score, ScoredEpisode, Split, Task, ToolCall
from agentrl.session.transcript import transcript


def test_an_example_conversation_in_the_prompt_keeps_its_tool_calls() -> None:
    call = ToolCall(name="python", arguments={"code": "print(1)"})
    task = Task(
        id="t",
        family="f",
        prompt=(
            Message(role="user", content="What is 1?"),
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content="1"),
            Message(role="user", content="What is 2?"),
        ),
        tools=("python",),
        sandbox=SandboxSpec(image="i"),
        verifiers=(),
        data={},
        split=Split.TRAIN,
    )
    episode = Episode(id="e", task_id=task.id, task_key=task.key, trajectories=())
    record = transcript(task, ScoredEpisode(episode=episode, score=Score(value=1.0)), phase="train", step=0)
    assert record["messages"][1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "python", "arguments": {"code": "print(1)"}}],
    }
