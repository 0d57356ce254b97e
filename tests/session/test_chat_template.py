"""The recipe's chat template replaces the model's own: in the run, its versions and its export."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.agent.template import TOOL, auto_tokenizer, read_template
from agentrl.config import PolicyConfig, Recipe, SamplingConfig, TasksConfig
from agentrl.errors import UserError
from agentrl.protocols import TaskFamily
from agentrl.records import Message, Split, Task
from agentrl.session.models import copy_base_version, export_model, find_model
from agentrl.session.preflight import check_prompt, open_chat, run_preflight
from sandboxes.tables import Tables

MODEL = Path(__file__).resolve().parents[2] / "recipes" / "models" / "tables-base"
HERMES = read_template("hermes", Path())
pytestmark = pytest.mark.usefixtures("forked_trials")
RECIPE = Recipe(name="x", policy=PolicyConfig(model=str(MODEL), max_model_len=512), tasks=TasksConfig(family="f:F"))


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The base policy without a template."""
    folder = Path(shutil.copytree(MODEL, tmp_path / "bare"))
    (folder / "chat_template.jinja").unlink()
    return folder


def test_an_unknown_template_name_fails_first(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chat template 'herms' is neither built in \(hermes, chatml, llama3, .*\)"):
        run_preflight(RECIPE.but("policy.chat_template=herms", "policy.model=absent"), tmp_path, root=tmp_path)


def test_an_unknown_tool_format_fails_first(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policy\.tool_format=hermse: unknown form of tool calls\n  fix: use one of hermes, qwen3_coder"):
        run_preflight(RECIPE.but("policy.tool_format=hermse", "policy.model=absent"), tmp_path, root=tmp_path)
    assert open_chat(MODEL, policy=RECIPE.policy).tool_format == "hermes"
    with pytest.raises(UserError, match=r"policy\.rewritten_context=restart has no effect"):
        open_chat(MODEL, policy=RECIPE.policy.but("rewritten_context=restart"))


def test_a_model_needs_no_template_if_the_recipe_has_one(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no chat template.*\n  fix: set policy\.chat_template"):
        find_model("bare", tmp_path)
    with pytest.raises(UserError, match="'f'"):  # the template passed; the family fails
        run_preflight(RECIPE.but({"policy.model": "bare", "policy.chat_template": "hermes"}), tmp_path, root=tmp_path)


def test_a_resumed_run_does_not_reread_its_template(bare: Path, tmp_path: Path) -> None:
    recipe = RECIPE.but({"policy.model": "bare", "policy.chat_template": "gone.jinja"})
    with pytest.raises(UserError, match=r"chat template 'gone\.jinja' is neither"):
        run_preflight(recipe, tmp_path, root=tmp_path)
    copy_base_version(bare, tmp_path / "versions" / "000000", template=HERMES)
    with pytest.raises(UserError, match="'f'"):
        run_preflight(recipe, tmp_path, root=tmp_path)


def test_the_template_of_the_recipe_is_in_every_version_and_in_the_export(bare: Path, tmp_path: Path) -> None:
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "the model's own"}))
    base = tmp_path / "versions" / "000000"
    copy_base_version(bare, base, template=HERMES)
    export_model(base, tmp_path / "model", base=base, sampling=SamplingConfig(temperature=0.5))
    task = Tables(seed=0).task(Split.TRAIN, 0)
    expected = open_chat(bare, HERMES).opening(task.prompt, [TOOL])
    for folder in (base, tmp_path / "model"):
        assert auto_tokenizer().from_pretrained(folder).chat_template == HERMES
        assert open_chat(folder).opening(task.prompt, [TOOL]) == expected
    assert json.loads((bare / "tokenizer_config.json").read_text())["chat_template"] == "the model's own"
    assert expected != open_chat(MODEL).opening(task.prompt, [TOOL])


class First(TaskFamily):
    """A family of one task."""

    name = "first"

    def __init__(self, task: Task) -> None:
        self._task = task

    def size(self, split: Split) -> int | None:
        return 1

    def task(self, split: Split, index: int) -> Task:
        return self._task


def test_a_template_that_rejects_the_first_task_fails_before_the_start() -> None:
    task = Tables(seed=0).task(Split.TRAIN, 0)
    chat = open_chat(MODEL, read_template("chatml", Path()))
    with pytest.raises(UserError, match="with tools: TemplateError: chatml shows no tools to a model; use hermes"):
        check_prompt(chat, First(task))
    check_prompt(chat, First(replace(task, tools=())))
    check_prompt(open_chat(MODEL, HERMES), First(task))
    proud = HERMES + "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    with pytest.raises(UserError, match=r"messages of system, user.*no system messages"):
        check_prompt(open_chat(MODEL, proud), First(replace(task, prompt=(Message(role="system", content="s"), *task.prompt[-1:]))))
