"""The checks that are made before a run starts its parts: installed packages, the model and user-supplied code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.agent import forms, load_tools
from agentrl.agent.contexts import with_instructions
from agentrl.agent.mcp.servers import MCP_PREFIX
from agentrl.agent.run_tools import declared_tools
from agentrl.agent.template import read_template
from agentrl.base import error_text
from agentrl.base.database import require_full_text_search
from agentrl.base.error_text import one_line_error
from agentrl.base.installation import install_command
from agentrl.base.media import MediaFolder
from agentrl.base.user_code import raising_as
from agentrl.cluster import ClusterPlan, plan_here
from agentrl.cluster.device import serving_device
from agentrl.config.recipe import EvalConfig, PolicyConfig, Recipe
from agentrl.errors import AgentRLError, PluginError, RecipeError, TaskError, UserError
from agentrl.evaluation.splits import with_thinking_bound
from agentrl.evaluation.suite_code import check_suite_code
from agentrl.failure.case import Suite, load_suite
from agentrl.failure.overlap import WithheldTasks, load_withheld
from agentrl.failure.practice import PracticeSchedule
from agentrl.failure.triage import load_rules
from agentrl.memory import scope_of
from agentrl.memory.run_memory import placeholder_memory
from agentrl.objective.trial import try_estimator, try_loss
from agentrl.plugins import parts
from agentrl.protocols import EpisodeMemory, Sandbox, SandboxBackend, TaskFamily, ToolSource
from agentrl.protocols.reward import GroupJudge
from agentrl.records import Split, Task
from agentrl.reward import TaskScorer
from agentrl.reward.group_judging import load_group_judge
from agentrl.reward.verifier_call import prepare_verifier
from agentrl.rollout import thinking_bound
from agentrl.session.folder import check_disk
from agentrl.session.judge_servers import check_judge_servers_used, check_reward_model_vocabulary, declare_judges
from agentrl.session.models import check_disk_space, find_model
from agentrl.session.run_practice import open_run_practice
from agentrl.task import open_family
from agentrl.task.outputs import sandbox_of
from agentrl.version.model_folder import check_model, read_json

if TYPE_CHECKING:
    from agentrl.agent.chat import ChatFormat


_COPY_PATH, _COPY_DATA = ".agentrl-copy", b"a file that is to be in the copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """The objects that the preflight checks opened. None of these objects is running."""

    model: Path  # folder of the initial policy
    template: str | None  # in a new run, a chat template that replaces the one in the model
    family: TaskFamily
    scorer: TaskScorer  # scorer that has loaded the verifiers of the first task
    plan: ClusterPlan  # the parts to start, and their GPUs
    suite: Suite | None = None  # suite of the gate, if the recipe has a gate
    withheld: WithheldTasks = field(default_factory=lambda: WithheldTasks(()))  # tasks that are never used for training
    practice: PracticeSchedule | None = None  # tasks generated from cases, if the recipe has any
    group_judge: GroupJudge | None = None  # judges all attempts of a group together, if the recipe has one
    judges: Mapping[str, Path] = field(default_factory=dict)  # model folders of the judges' servers, by name
    notes: tuple[str, ...] = ()  # alerts about problems that do not prevent the run


def run_preflight(recipe: Recipe, folder: Path, *, root: Path, training: bool = True) -> PreflightResult:
    """Runs all checks that take at most a few seconds, the cheapest first. Downloads the model if necessary. Raises `UserError` if a check
    fails.

    `training`: whether a learner and the recipe's gate will start and need GPUs.
    """
    check_disk(folder)
    template_name = recipe.policy.chat_template
    begun = (folder / "versions" / "000000").is_dir()  # version 0 of a resumed run contains the template
    template = None if template_name is None or begun else read_template(template_name, root)
    if recipe.policy.tool_format is not None:
        forms.call_form(recipe.policy.tool_format)
    model = find_model(recipe.policy.model, root, chat_template=template_name is None)
    check_model(model, recipe)
    disk = check_disk_space(recipe, model, folder) if training else ()
    _check_known(str(read_json(model / "config.json")["model_type"]))
    check_parts(recipe)
    check_delegation(recipe, root=root)
    judges = declare_judges(recipe, root=root)
    family, scorer = open_tasks(recipe, root=root, folder=folder)
    group_judge = open_group_judge(recipe, root=root, folder=folder)
    suite = open_gate_suite(recipe, scorer, root=root)
    kept_away = load_withheld(measured_suites(recipe), root=root)
    practice, notes = open_run_practice(recipe, family, scorer, kept_away, root=root, folder=folder)
    check_judge_servers_used()
    check_reward_model_vocabulary(model)
    load_rules(recipe.capture.rules)
    plan = plan_here(recipe, training=training)
    _check_installed(recipe)
    _try_objective(recipe)
    return PreflightResult(
        model=model,
        template=template,
        family=family,
        scorer=scorer,
        plan=plan,
        suite=suite,
        withheld=kept_away,
        practice=practice,
        judges=judges,
        group_judge=group_judge,
        notes=(*disk, *notes),
    )


def check_parts(recipe: Recipe) -> None:
    """Resolves the parts of the recipe that are plug-ins and checks them against their protocols. Raises a `PluginError` that lists all
    problems, and `UserError` if the recipe needs a feature that its agent lacks."""
    configured: list[tuple[parts.PartKind, parts.Part]] = [
        (parts.AGENT, recipe.agent),
        (parts.BACKEND, recipe.sandbox.backend),
        (parts.CHANNEL, recipe.serving.weight_transfer),
        (parts.STORE, recipe.store),
        *((parts.TRACKER, tracker) for tracker in recipe.trackers),
        (parts.ADVANTAGE, recipe.objective.advantage),
        (parts.LOSS, recipe.objective.loss),
    ]
    wrong: list[PluginError] = []
    for kind, part in configured:
        if part.ref not in kind.shipped:  # the type checker checks built-in parts
            try:
                parts.load_part(kind, part)
            except PluginError as error:
                wrong.append(error)
    if len(wrong) > 1:
        raise PluginError("\n".join(map(str, wrong)))
    if wrong:
        raise wrong[0]
    _check_agent(recipe)


def _check_agent(recipe: Recipe) -> None:
    """Raises `UserError` if the recipe needs a feature that its agent declares as unsupported: capturing its state between turns, or using
    the tools of tasks."""
    rollout = recipe.rollout
    if recipe.agent.ref in parts.AGENT.shipped:
        return
    agent = parts.load_part(parts.AGENT, recipe.agent)
    agent = getattr(agent, "func", agent)
    states = ("boundaries", "the state of this agent between two turns cannot be captured")
    tools = ("task_tools", "this agent uses its own tools instead of those of the task")
    wanted = {
        "rollout.group.branches": (rollout.group.branches > 1, *states),
        "rollout.checkpoint_turns": (rollout.checkpoint_turns, *states),
        "rollout.compaction": (rollout.compaction is not None, *tools),
        "rollout.instructions": (rollout.instructions is not None, *tools),
        "memory": (recipe.memory is not None, *tools),
        "mcp": (bool(recipe.mcp), *tools),
        "tools": (bool(recipe.tools), *tools),
    }
    for key, (is_set, has, why) in wanted.items():
        if is_set and not getattr(agent, has, True):
            raise UserError(f"{key} does nothing with rollout.agent={recipe.agent}: {why}", fix=f"remove {key}")


def check_delegation(recipe: Recipe, *, root: Path) -> None:
    """Raises `UserError` if the recipe's tools for sub-agents do not load, or if each sub-agent would get a separate sandbox but no tool
    uses one."""
    config = recipe.rollout.delegation
    names = config.tools if config is not None and config.tools is not None else ()
    try:
        tools = load_tools(names, None, declared_tools(recipe.mcp, recipe.tools, root))
    except UserError as error:
        raise RecipeError(f"rollout.delegation.tools: {error.message}", fix=error.fix) from error
    if config is None or config.tools is None or config.sandbox == "shared" or any(name.startswith(MCP_PREFIX) for name in names):
        return
    if not any(tool.needs_sandbox for tool in tools.values()):
        raise RecipeError(
            "rollout.delegation.sandbox=own does nothing: none of rollout.delegation.tools uses a sandbox",
            fix="add a tool that uses one, such as python or shell, or set sandbox=shared",
        )


def _try_objective(recipe: Recipe) -> None:
    """Tests a user-supplied estimator or loss on a tiny step."""
    if recipe.objective.advantage.ref not in parts.ADVANTAGE.shipped:
        try_estimator(recipe.objective, group_size=recipe.rollout.group.size)
    if recipe.objective.loss.ref not in parts.LOSS.shipped:
        try_loss(recipe.objective)


def _check_installed(recipe: Recipe) -> None:
    from agentrl.run.group_stream import check_stream

    serving_device(recipe)
    check_stream(recipe)
    require_full_text_search()
    for package in ("torch", "transformers", "deepspeed"):
        if find_spec(package) is None:
            fix = f"{install_command('cpu')}, or with [gpu]; agentrl doctor shows what is missing"
            raise UserError(f"{package} is not installed", fix=fix)


def _check_known(kind: str) -> None:
    """Raises `UserError` if the installed transformers does not support the model type.

    The check searches the source code of the auto classes, because importing these classes takes many seconds.
    """
    spec = find_spec("transformers")
    places = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in places or () for file in (Path(folder) / "models" / "auto").glob("*.py")]
    if files and not any(f'"{kind}"' in file.read_text(encoding="utf-8") for file in files):
        raise UserError(
            f"policy.model: the installed transformers does not support the model type {kind!r}",
            fix="use a supported architecture, such as Qwen3 or Llama, or a newer transformers",
        )


def open_tasks(recipe: Recipe, *, root: Path, folder: Path | None = None, held_out: bool = True) -> tuple[TaskFamily, TaskScorer]:
    """Returns the recipe's task family, and a scorer with the verifiers of its first task. Raises `UserError`, even if the cause is a bug
    in the code of the family or a verifier.

    Args:
        held_out: whether to check that the family has the held-out tasks that the recipe needs.
    """
    scorer = TaskScorer(root=root, folder=folder, audit=recipe.tasks.audit)
    family_name = recipe.tasks.family.ref
    family = open_family(recipe.tasks, seed=recipe.seed, root=root)

    def broken_task(error: BaseException) -> TaskError:
        problem = f"{one_line_error(error)} ({error_text.raise_location(error)})"
        return TaskError(f"the first task of {family_name!r} is broken: {problem}", fix="correct the code at this location")

    with raising_as(broken_task, but=(AgentRLError,)):
        if held_out:
            _check_sizes(family, recipe)
        first = family.task(Split.TRAIN, 0)
    if not isinstance(first, Task):
        raise TaskError(
            f"the first task of {family_name!r} has type {type(first).__name__} instead of Task",
            fix="return agentrl.records.Task(...) from its task()",
        )
    scorer.load([*first.verifiers, *recipe.tasks.audit])
    load_tools(first.tools, None, declared_tools(recipe.mcp, recipe.tools, root), placeholder_memory(recipe))
    if recipe.memory is not None:
        scope_of(first, recipe.memory.scope)
    return family, scorer


def open_group_judge(recipe: Recipe, *, root: Path, folder: Path | None = None) -> GroupJudge | None:
    """Returns the prepared judge of groups; None if the recipe has none. Raises `UserError` if the judge cannot be loaded or prepared."""
    if recipe.tasks.group_judge is None:
        return None
    judge = load_group_judge(recipe.tasks.group_judge)
    prepare_verifier(judge, root=root, folder=folder)
    return judge


def open_gate_suite(recipe: Recipe, scorer: TaskScorer, *, root: Path) -> Suite | None:
    """Returns the suite of the recipe's gate; None if the recipe has no gate.

    Raises `UserError` if the suite is invalid, if a verifier or a tool is missing, or if the weight transfer does not support a gate.
    """
    if recipe.gate is None:
        return None
    if recipe.serving.weight_transfer.ref == "nccl":
        raise UserError(
            "gate: serving.weight_transfer=nccl cannot serve an older promoted version again",
            fix="set serving.weight_transfer=file or delta",
        )
    suite = load_suite(root / recipe.gate.suite)
    check_suite(suite, scorer, declared_tools(recipe.mcp, recipe.tools, root), root=root, family=recipe.tasks.family)
    return suite


def measured_suites(recipe: Recipe) -> list[str]:
    """Returns the suites whose cases must not be used for training."""
    tasks = recipe.tasks
    gate = [recipe.gate.suite] if recipe.gate is not None else []
    return list(dict.fromkeys([*tasks.withhold, *gate, *tasks.practice]))


def check_suite(
    suite: Suite, scorer: TaskScorer, tools: ToolSource | None = None, *, root: Path | None, family: parts.Part | None = None
) -> None:
    """Resolves the verifiers and tools of every case. Raises `UserError` if one of them cannot be resolved.

    `root`: folder of the project. Raises `UserError` if a case names code or images outside this folder. None, which is passed for cases
    from the recipe's task family, disables this check. `family`: as for `check_suite_code`.
    """
    if root is not None:
        check_suite_code(suite, root, family=family)
    for case in suite.cases:
        scorer.load(case.task.verifiers)
        load_tools(case.task.tools, None, tools)


def _check_sizes(family: TaskFamily, recipe: Recipe) -> None:
    """Raises `UserError` if a split that the recipe uses is empty, or if its size is not a number."""
    evaluation = recipe.evaluation
    needed = {Split.TRAIN: 1, Split.HELDOUT: evaluation.heldout, Split.HELDOUT_REAL: evaluation.heldout_real}
    for split, count in needed.items():
        size: object = family.size(split) if count else None
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise PluginError(
                f"tasks.family {recipe.tasks.family.ref!r}: size({split}) returned {type(size).__name__} instead of a number of tasks",
                fix="return the number of tasks in the split, or None if it is endless",
            )
        if size is not None and size < 1:
            instead = "" if split is Split.TRAIN else f", or set evaluation.{split}=0"
            raise UserError(f"tasks.family {recipe.tasks.family.ref!r} has no tasks in split {split}", fix=f"add some{instead}")


def open_chat(
    model: Path, template: str | None = None, *, policy: PolicyConfig | None = None, media: MediaFolder | None = None
) -> ChatFormat:
    """Returns the chat format of a model's tokenizer. `template` replaces the template in the model. Because it imports transformers, this
    is the last check.

    `policy` sets the format of tool calls and the handling of a template that cannot be extended. `media`: folder in which images are
    stored. Raises `UserError` if the tokenizer does not load, the template cannot be used, or the format of tool calls is unknown.
    """
    from agentrl.agent.chat import load_chat

    try:
        if policy is None:
            return load_chat(str(model), template, media=media)
        return load_chat(str(model), template, tool_format=policy.tool_format, rewritten=policy.rewritten_context, media=media)
    except (AgentRLError, ImportError):
        raise
    except Exception as error:  # transformers and tokenizers raise arbitrary errors
        raise UserError(
            f"policy.model: the tokenizer in {model} cannot be used: {one_line_error(error)}",
            fix="save the tokenizer again with save_pretrained of the installed transformers",
        ) from error


def check_prompt(
    chat: ChatFormat,
    family: TaskFamily,
    tools: ToolSource | None = None,
    memory: EpisodeMemory | None = None,
    instructions: str | None = None,
) -> None:
    """Raises `UserError` if the chat template does not accept the first task: its messages, its tools, or its bound on thinking."""
    first = family.task(Split.TRAIN, 0)
    thinking_bound(first, chat.thinking)
    schemas = [tool.schema for tool in load_tools(first.tools, None, tools, memory).values()]
    if first.environment is None:  # if the prompt ends with an observation, `check_environment` checks it
        chat.opening(with_instructions(first.prompt, instructions), schemas)


def check_thinking(chat: ChatFormat, family: TaskFamily, config: EvalConfig) -> None:
    """Raises `UserError` if the thinking bounds of the recipe's evaluations cannot be enforced or leave no tokens for an answer."""
    if not config.thinking_tokens:
        return
    if chat.thinking is None:
        raise UserError(
            "evaluation.thinking_tokens does nothing: the policy's chat template has no <think> and </think>",
            fix="remove this setting, or use a model that thinks between these tags",
        )
    for split, count in ((Split.HELDOUT, config.heldout), (Split.HELDOUT_REAL, config.heldout_real)):
        if count and family.size(split) != 0:
            with_thinking_bound(family.task(split, 0), max(config.thinking_tokens))


async def check_snapshots(recipe: Recipe, task: Task, sandboxes: SandboxBackend) -> None:
    """Tests opening a sandbox from the snapshot of a different sandbox if the recipe needs this. Built-in backends are not checked.

    Raises `UserError` if no snapshot can be taken or the snapshot does not restore the same files, and `InfrastructureError` if no sandbox
    can be opened.
    """
    rollout = recipe.rollout
    wanted = {
        "rollout.delegation.sandbox=own": rollout.delegation is not None and rollout.delegation.sandbox == "own",
        "rollout.group.branches": rollout.group.branches > 1,
        "rollout.checkpoint_turns": rollout.checkpoint_turns,
    }
    key = next((key for key, on in wanted.items() if on), None)
    if key is None or task.sandbox is None or recipe.sandbox.backend.ref in parts.BACKEND.shipped:
        return
    await sandboxes.prepare(sandbox_of(task))
    first = await sandboxes.open(sandbox_of(task), files=task.contents())
    try:
        problem = await _copy_problem(recipe, task, sandboxes, first)
    finally:
        await first.close()
    if problem:
        raise UserError(
            f"{key} needs copies of a working directory, but sandbox.backend={recipe.sandbox.backend} does not create them: {problem}",
            fix="implement its Sandbox.snapshot() and open(snapshot=...) (agentrl sandbox check tests them), use a different backend, or"
            f" remove {key.partition('=')[0]}",
        )


async def _copy_problem(recipe: Recipe, task: Task, sandboxes: SandboxBackend, first: Sandbox) -> str:
    """Copies the working directory of the first sandbox to a second one. Returns the problem with the copy; empty if there is none."""
    await first.write(_COPY_PATH, _COPY_DATA)
    try:
        archive = await first.snapshot()
        second = await sandboxes.open(sandbox_of(task), snapshot=archive)
    except Exception as error:  # a user-supplied backend may raise anything
        return one_line_error(error)
    try:
        copied = await second.read(_COPY_PATH, max_bytes=2 * len(_COPY_DATA))
        return "" if copied == _COPY_DATA else "the content of a file in it differs"
    except (FileNotFoundError, ValueError) as error:
        return f"a file in it is missing: {one_line_error(error)}"
    finally:
        await second.close()
