"""The matrix of third-party programs: its cells, its table, and how exactness is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import TurnLoop
from agentrl.records import Split
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from benchmarks.outside import matrix, sdk, session
from benchmarks.outside.program import COLUMNS, PROTOCOLS, Program, Way
from benchmarks.outside_programs import PROGRAMS, chosen
from tests.chats import chat_of
from tests.episodes import task, tokenizer

__all__ = ["task", "tokenizer"]

WAY = Way(protocol="chat", stream=False, command=("run",))
PROGRAM = Program(
    name="p", version="p 1", install=lambda folder: ["pip", "p==1"], ways=(WAY,), says=lambda prompt, results: "", prints="DONE"
)
OK: dict[str, Any] = {
    **{"program": "p", "version": "p 1", "column": "chat", "test_passed": True, "exact_share": 1.0, "exit": 0, "output": "", "reason": ""},
    **{"requests": {"/v1/chat/completions whole": 3}, "options": ["stop", "tool_choice=auto", "tools"], "errors": [], "failures": []},
    "trajectories": [["main", 3], ["sub-agent", 2]],
}


def test_every_program_has_an_exact_version_and_every_column_one_entry() -> None:
    for program in PROGRAMS.values():
        columns = [way.column for way in program.ways]
        assert set(columns) <= set(COLUMNS) and set(program.absent) <= set(COLUMNS) - set(columns), program.name
        assert len(columns) == len(set(columns)) and program.environment in PROGRAMS
        assert all(path.exists() for way in program.ways for path in way.files.values())
        packages = [word for word in program.install(Path("folder")) if "@" in word[1:] or "==" in word]
        assert packages, program.name
    assert len(chosen([])) == sum(len(program.ways) for program in PROGRAMS.values())
    assert [way.column for _, way in chosen(["pydantic-ai:messages"])] == ["messages"]
    with pytest.raises(SystemExit, match="unknown program"):
        chosen(["nothing"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"test_passed": False, "output": "a\nTypeError: b\n"}, "ended with status 0: TypeError: b"),
        ({"exit": 1, "errors": ["POST /v1/responses 400: no"]}, "POST /v1/responses 400: no"),
        ({"exact_share": 0.5}, "share of exact tokens 0.500"),
        ({"requests": {"/v1/chat/completions streamed": 3}}, "it requests /v1/chat/completions streamed"),
    ],
)
def test_a_cell_is_ok_or_has_its_reason(change: dict[str, Any], reason: str) -> None:
    assert session.reason({**OK, **change}, PROGRAM, WAY, "DONE") == reason


def test_a_program_that_does_not_print_its_answer_is_not_ok() -> None:
    assert session.reason(OK, PROGRAM, WAY, "") == "its output does not contain 'DONE'"


def test_the_table_shows_each_cell_with_its_reason() -> None:
    program = replace(PROGRAM, absent=dict.fromkeys(("responses", "responses-streamed"), "not offered"), features="handoff")
    lines = matrix.table([OK, {**OK, "column": "messages", "reason": "400: a|b"}], {"p": program}).splitlines()
    assert lines[2] == "| p 1 | OK | - | - (1) | - (1) | no (2) | - | handoff, `stop` |"
    assert lines[4:] == ["1. not offered", "2. 400: a\\|b"]


def test_a_cell_depends_on_how_the_program_is_run() -> None:
    [way] = sdk.ways("litellm", ["chat"])
    same, other = matrix.measured_code(PROGRAM, way), matrix.measured_code(PROGRAM, replace(way, command=("run", "again")))
    assert same == matrix.measured_code(PROGRAM, way) != other


def test_the_options_of_a_request_are_listed() -> None:
    body = b'{"model": "m", "stop": ["a"], "user": null, "tool_choice": {"type": "any"}, "text": {"format": {"type": "json_schema"}},'
    body += b' "tools": [{"strict": true}]}'
    assert sorted(session.options(body)) == ["stop", "strict", "text=json_schema", "tool_choice=any", "tools"]
    assert list(session.options(b"not json")) == [] and PROTOCOLS["chat"] == "/v1/chat/completions"


async def test_the_exact_share_counts_tokens_after_the_ids_that_the_policy_was_shown(tokenizer: Any, task: Any) -> None:
    policy = session.Competent(tokenizer, lambda prompt, results: "eight")
    runner = EpisodeRunner(
        agent=TurnLoop(chat=chat_of(tokenizer)),
        policy=policy,
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=4000,
        request_timeout_s=60.0,
    )
    episode = await runner.run(replace(task, split=Split.TRAIN), episode_id="e")
    [(prompt, completion)] = policy.sampled
    assert session.exact_share(episode, policy.sampled) == 1.0
    assert session.exact_share(episode, [((*prompt, 1), completion)]) == 0.0
    assert session.exact_share(episode, [(prompt, (completion[0] + 1, *completion[1:]))]) == 0.0
