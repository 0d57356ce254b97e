"""Memory tools in an episode with sub-agents that is captured, resumed and branched, and tasks with tools of the same names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent import load_tools, tool
from agentrl.agent.mcp.servers import RunTools
from agentrl.agent.memory import SCHEMAS
from agentrl.agent.tools import Bounds
from agentrl.config.rollout import DelegationConfig
from agentrl.config.tools import MemoryConfig
from agentrl.errors import TaskError
from agentrl.memory import NoteStore, StoreView, WrittenNotes
from agentrl.records import EpisodeState, Task, codec
from agentrl.records.episode import Memo
from agentrl.rollout import CaptureState, EmptyMemory
from agentrl.testing.sandboxes import sample_task
from tests.agent.trees import call, delegate, make_runner, outputs, tool_responses, tree_task, user_prompt

SCOPE = "family:f"


@tool
def note(text: str) -> str:
    """A tool of the task."""
    return text


def view_of(task: Task) -> StoreView:
    store = NoteStore(None, MemoryConfig(notes=3))
    store.commit(0, [WrittenNotes(episode="e0", task_key="k", memo=Memo(scope=SCOPE, notes=("rows are lines",)))])
    return StoreView.of(store, task, 1)


def reads(context: str) -> str:
    """The main agent writes a note, delegates two tasks, writes another note and answers; each sub-agent recalls, and writes a note."""
    tool_outputs = tool_responses(context)
    if user_prompt(context) == "How many?":
        return [call("note", text="main"), delegate("rows?", "columns?"), call("note", text="late"), "3"][min(3, _turns(context))]
    return tool_outputs[-1] if tool_outputs else call("recall", query="rows") + call("note", text=user_prompt(context))


def _turns(context: str) -> int:
    return context.count("<|im_start|>assistant") - 1


async def test_sub_agents_share_the_episodes_memory_after_a_resume_too(tokenizer: Any, task: Task) -> None:
    task = replace(tree_task(task), family="f")
    runner, states = make_runner(tokenizer, reads, delegation=DelegationConfig(turns=2)), list[EpisodeState]()

    async def on_turn(turns: int, capture: CaptureState) -> None:
        state = await capture()
        assert state is not None
        states.append(codec.from_json(EpisodeState, codec.to_json(state)))

    view = view_of(task)
    full = await runner.run(task, episode_id="e", memory=view, on_turn=on_turn)
    assert full.memory is not None and full.memory.notes[0] == "main" and {*full.memory.notes[1:]} == {"rows?", "columns?"}
    assert full.memory.read == ("e0",) and full.memory.scope == SCOPE
    assert outputs(full.trajectories[1]) == ["1. rows are lines", "noted"]
    assert "the limit of 3 notes for this task is reached" in outputs(full.trajectories[0])[-1], "all agents share one budget"
    assert codec.from_json(type(full), codec.to_json(full)) == full
    assert [state.memory and len(state.memory.notes) for state in states] == [1, 3, 3]
    for name in ("e", "branch"):
        resumed = await runner.run(task, episode_id=name, memory=view, start=states[1])
        assert resumed.memory == full.memory and resumed.answer == "3", "no note is written twice"
    later = await runner.run(task, episode_id="later", memory=view, start=replace(states[1], memory=None))
    assert later.memory is None and "no tool 'note'" in outputs(later.trajectories[0])[-1], "its context offers no memory tools"


def test_memory_tools_follow_the_tasks_tools_with_the_recipes_bounds() -> None:
    memory = EmptyMemory(Memo(scope=SCOPE))
    run = RunTools(servers={}, bounds={"recall": Bounds(calls=2)})
    tools = load_tools(("python", "submit"), None, run, memory)
    assert list(tools) == ["python", "submit", "note", "recall"] and tools["recall"].bounds == Bounds(calls=2)  # type: ignore[attr-defined]
    assert [tools[name].schema for name in ("note", "recall")] == list(SCHEMAS)
    assert SCHEMAS[0]["function"]["parameters"]["required"] == ["text"] and not SCHEMAS[1]["function"]["parameters"]["required"]
    clash = sample_task(tools=(f"{__file__}:note",))
    assert list(load_tools(clash.tools)) == ["note"]
    with pytest.raises(TaskError, match="called 'note', but a tool of the recipe's memory has the same name"):
        load_tools(clash.tools, memory=memory)
