"""Every key of a recipe has an effect, or is an error. Checked for all keys of all sections.

A pool of recipes covers typical use: each part of a run is on in one recipe and off in another. For every key, code reads it, some
recipe of the pool accepts a value other than the default, and if its annotation declares it idle under a condition (`Needs`), the
error names the key. If the effect of a key can be computed without a machine, every accepted value must change it in every recipe.
"""

from __future__ import annotations

import ast
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest

from agentrl.config import Part, Recipe, build
from agentrl.config.section import Needs, Section, named_section_of, section_of
from agentrl.errors import RecipeError
from agentrl.learner.optimizer import learning_rate
from agentrl.serving.judge_server import JudgeServer
from agentrl.serving.server import VLLMServer

PACKAGE = Path(__file__).resolve().parents[2] / "agentrl"
BASE = build(
    {
        "name": "base",
        "steps": 12,
        "policy": {"model": "m"},
        "tasks": {"family": "a:b"},
        "judge_servers": {"small": {"model": "m"}},
        "mcp": {"far": {"url": "http://h/mcp"}},
        "tools": {"t": {"calls": 3}},
    }
)
OWN = "tests.own:part"
POOL: dict[str, Mapping[str, Any]] = {
    "defaults": {},
    "cpu": {"device": "cpu"},
    "gpu": {"device": "cuda"},
    "one step": {"steps": 1},
    "two steps": {"steps": 2},
    "no staleness": {"max_staleness": 0},
    "nothing held out": {"evaluation.heldout": 0, "evaluation.heldout_real": 0},
    "nothing held out, with a gate": {"evaluation.heldout": 0, "evaluation.heldout_real": 0, "gate": {"suite": "s"}},
    "sampled evaluation": {"evaluation.sampling.temperature": 0.5},
    "truncated": {"rollout.sampling.top_k": 64, "evaluation.sampling.top_k": 8},
    "few sandboxes": {"sandbox.max_open": 4},
    "many sandboxes": {"sandbox.max_open": 512},
    "gate": {"gate": {"suite": "s"}},
    "gate that blocks": {"gate": {"suite": "s", "action": "block"}},
    "limits": {
        "learner.limits": [{"metric": "kl_reference", "at": 0.1}, {"metric": "ratio_max", "at": 3.0, "action": "rollback"}],
        "objective.kl": "k3",
        "objective.kl_coef": 0.1,
    },
    "critic": {"objective.advantage": "gae", "critic": {}},
    "critic in passes": {"objective.advantage": "gae", "critic": {"epochs": 2}},
    "shared critic": {"objective.advantage": "gae", "critic": {"trunk": "shared"}, "learner.minibatches": 2},
    "whole batch": {"objective.advantage": "reinforce++"},
    "own estimator and loss": {"objective.advantage": OWN, "objective.loss": OWN, "objective.turn_coef": 0.5},
    "own parts": {
        "store": OWN,
        "trackers": [OWN],
        "sandbox.backend": OWN,
        "serving.weight_transfer": OWN,
        "rollout.agent": OWN,
    },
    "masked": {"objective.off_policy": {"preset": "mask"}, "learner.minibatches": 4},
    "constant": {"objective.aggregation": "constant"},
    "deltas": {"serving.weight_transfer": "delta"},
    "adapters": {"learner.lora": {}},
    "ranks": {"learner.ranks": 4, "learner.zero_stage": 3, "learner.max_tokens_per_microbatch": 65536},
    "delegating": {"rollout.agent": "delegating", "rollout.delegation": {"sandbox": "own"}, "sandbox.max_open": 1024},
    "shared delegation": {"rollout.agent": "delegating", "rollout.delegation": {}, "sandbox.max_open": 1024},
    "long context": {"policy.max_model_len": 4096},
    "compaction": {"rollout.compaction": 0.75},
    "branching": {"rollout.group.branches": 2},
    "memory": {"memory": {}},
    "few sub-agents": {"rollout.agent": "delegating", "rollout.delegation": {"total": 2}},
    "plain data parallelism": {"learner.zero_stage": 0},
    "bfloat16": {"policy.dtype": "bfloat16"},
    "group judge": {"tasks.group_judge": "rewards.mine:ranked"},
    "practice": {"tasks.practice": {"evals/a": 1}},
    "weighting": {"tasks.weighting": True},
    "cluster": {"cluster.address": "auto"},
    "cluster with resources": {"cluster.address": "head:6379", "cluster.resources": {"server": {"cpus": 2}}},
    "program in the sandbox": {"mcp": {"far": {"command": ["server"]}}},
    "program on the host": {"mcp": {"far": {"host_command": ["server"]}}},
}


@cache
def pool() -> dict[str, Recipe]:
    return {name: BASE.but(changes) for name, changes in POOL.items()}


def keys(kind: type[Section] = Recipe, path: str = "", inherited: tuple[tuple[Needs, str], ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every key with its field, whose conditions it adds to `CONDITIONS`: `learner.lr`, `judge_servers.*.threads`."""
    for name, field in kind.model_fields.items():
        key, inner, named = f"{path}{name}", section_of(field.annotation), named_section_of(field.annotation)
        conditions = (*inherited, *((need, key) for need in field.metadata if isinstance(need, Needs)))
        optional = inner is not None and field.get_default(call_default_factory=True) is None
        if optional or (inner is None and named is None):  # switching a section on is also a setting
            CONDITIONS[key] = conditions
            yield key, field
        if nested := inner or named:
            yield from keys(nested, f"{key}.*." if named else f"{key}.", () if optional or named else conditions)


CONDITIONS: dict[str, tuple[tuple[Needs, str], ...]] = {}
"""The conditions of a key, each with the key that declares it: the key or its section."""
KEYS = dict(keys())
NAMES = {"judge_servers": "small", "mcp": "far", "tools": "t"}


def concrete(key: str) -> str:
    """Returns the key with the name in the pool's recipes in place of `*`."""
    before, star, after = key.partition(".*.")
    return f"{before}.{NAMES[before]}.{after}" if star else key


def owner(recipe: Recipe, key: str) -> Any:
    """Returns the section of a key, or None if the recipe does not have it."""
    section: Any = recipe
    for part in concrete(key).split(".")[:-1]:
        section = section.get(part) if isinstance(section, dict) else getattr(section, part)
        if section is None:
            return None
    return section


CANDIDATES: dict[str, tuple[Any, ...]] = {
    # For keys whose type does not determine valid values.
    "trackers": (("terminal",),),
    "name": ("other",),
    "mcp.*.url": ("http://other/mcp",),
    "mcp.*.env": ({"A": "env:B"},),
    "mcp.*.key_env": ("A_KEY",),
    "tools.*.arguments": ({"a": "b"},),
    "rollout.delegation.returns": (("out/**",),),
    "gate": ({"suite": "s"},),
    "tasks.practice": ({"evals/b": 2},),
    "learner.ranks": (8, 2),
    "cluster.address": ("auto", "head:6379"),
    "cluster.resources": ({"server": {"cpus": 3}},),
    "learner.limits": (({"metric": "ess", "at": 0.5},),),
}


def others(key: str, field: Any, value: Any) -> Iterator[Any]:
    """Yields values of the type of a key other than the current `value` and the default."""
    default = field.get_default(call_default_factory=True)
    for candidate in CANDIDATES.get(key) or (other for kind in kinds(field.annotation) for other in values_of_kind(kind, value, field)):
        if candidate not in (value, default):
            yield candidate


def kinds(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from kinds(typing.get_args(annotation)[0])
    elif origin in (types.UnionType, typing.Union):
        for argument in typing.get_args(annotation):
            yield from kinds(argument)
    else:
        yield annotation


def values_of_kind(kind: Any, value: Any, field: Any) -> Iterator[Any]:
    if typing.get_origin(kind) is Literal:
        yield from typing.get_args(kind)
    elif isinstance(kind, type) and issubclass(kind, Section):
        yield from ({}, {"suite": "s"})
    elif kind is bool:
        yield not value
    elif kind in (int, float):
        current = value if isinstance(value, int | float) else 1
        for number in (2 * current, current + 1, current - 1, current / 2, current + 0.25, 2, 3, 0.5, 0.75, 0.9, 64):
            if kind is float or number == int(number):
                yield kind(number)
    elif typing.get_origin(kind) is tuple:
        yield from ((4,),) if int in typing.get_args(kind) else (("x.y:z",),)
    elif kind in (str, Part):
        yield "x.y:z"


def accepted(recipe: Recipe, key: str) -> Iterator[tuple[Recipe, Any]]:
    """Yields the recipe with each other value of a key that it accepts, and the value."""
    section = owner(recipe, key)
    if section is None:
        return
    for value in others(key, KEYS[key], getattr(section, key.rpartition(".")[2])):
        try:
            changed = recipe.but({concrete(key): value})
        except RecipeError:
            continue
        if changed != recipe:
            yield changed, value


@cache
def read_names() -> frozenset[str]:
    """Returns attribute names and string constants in the package, except for the checks of the sections."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parts[len(PACKAGE.parts)] in ("sections", "section.py", "gating.py", "recipe.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return frozenset(names)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_read_and_can_be_set(key: str) -> None:
    name = key.rpartition(".")[2]
    if key == "rollout.delegation":  # read through this property
        name = "agent_settings"
    assert name in read_names(), f"no code reads {key}"
    assert any(next(accepted(recipe, key), None) for recipe in pool().values()), (
        f"no recipe of the pool takes another value of {key} than its default: add one that does, or remove the key"
    )


@pytest.mark.slow
@pytest.mark.sampled(30)
@pytest.mark.parametrize("key", [key for key, conditions in CONDITIONS.items() if conditions])
def test_a_key_without_effect_in_a_recipe_is_an_error_that_names_it(key: str) -> None:
    field, name = KEYS[key], key.rpartition(".")[2]
    for need, declaring_key in CONDITIONS[key]:
        errors = 0
        for name_in_pool, recipe in pool().items():
            if (section := owner(recipe, key)) is None:
                continue
            for value in others(key, field, getattr(section, name)):
                try:
                    changed = recipe.but({concrete(key): value})
                except RecipeError as error:
                    errors += any(
                        line.partition(f"{concrete(key)}=")[2] and f" does nothing without {need.what}; otherwise leave it at" in line
                        for line in str(error).splitlines()
                    )
                    continue
                assert need.holds(changed, owner(changed, declaring_key)), (
                    f"{name_in_pool}: {key}={value!r} is accepted, although its declaration says that it is idle"
                )
        assert errors, f"no recipe of the pool raises an error for {key} without {need.what}"


def effects(recipe: Recipe, device: str) -> dict[str, Any]:
    """Returns the computable effects of a recipe: commands and environments of servers, evaluations, learning rates."""
    computed: dict[str, Any] = {}
    folder = Path("/nowhere")
    server = VLLMServer(recipe=recipe, model=folder, version=0, run_dir=folder)
    serving = recipe.serving
    server._threads = (serving.threads or 7) if device == "cpu" else None
    computed["server"] = (server._command(), server._environment(), serving.replicas)
    for name, config in recipe.judge_servers.items():
        judge = JudgeServer(name, config, model=folder, reward_model=False, folder=folder, device=device)
        computed[f"judge {name}"] = (judge._command(), judge._environment())
    computed["evaluations"] = list(evaluations(recipe))
    computed["rates"] = [learning_rate(recipe.learner, recipe.step_limit, step) for step in range(recipe.steps or 16)]
    computed["sandboxes"] = recipe.sandbox.max_open
    computed["lag"] = min(recipe.max_staleness, recipe.step_limit - 1)
    return computed


def evaluations(recipe: Recipe) -> Iterator[Any]:
    """Yields the sampled evaluations of a run. A gate samples its cases in the same way."""
    evaluation, sampling = recipe.evaluation, recipe.evaluation.distribution
    last = recipe.steps or 16
    for version in range(last + 1):
        ends = version in (0, last)
        if ends or (evaluation.every and version % evaluation.every == 0):
            for split, count in (("heldout", evaluation.heldout), ("heldout_real", evaluation.heldout_real)):
                if count:
                    yield version, split, count, evaluation.attempts, sampling, evaluation.thinking_tokens
    if recipe.gate is not None:
        yield "gate", sampling


USUAL = ("defaults", "cpu", "gpu", "sampled evaluation")


def trials(key: str, where: str) -> Iterator[tuple[Any, bool]]:
    """Yields values of a key that a recipe of the pool accepts, and whether an effect changes on any device."""
    for changed, value in islice(accepted(pool()[where], key), 4):
        yield value, effects_by_device(changed) != original_effects(where)


def effects_by_device(recipe: Recipe) -> list[dict[str, Any]]:
    """Returns the effects on each device that the recipe allows."""
    return [effects(recipe, device) for device in (("cpu", "cuda") if recipe.device == "auto" else (recipe.device,))]


@cache
def original_effects(where: str) -> list[dict[str, Any]]:
    return effects_by_device(pool()[where])


@pytest.mark.slow
def test_a_key_with_an_effect_has_it_in_every_recipe_that_accepts_it() -> None:
    """A recipe may not accept a value of such a key if no computed effect changes."""
    active = {key for key in KEYS if key not in ("device", "gate") and any(acts for where in USUAL for _, acts in trials(key, where))}
    assert active >= {"serving.kv_cache_gb", "evaluation.every", "learner.lr_schedule", "judge_servers.*.threads"}
    idle = [f"{key}={value!r} in {where!r}" for key in sorted(active) for where in POOL for value, acts in trials(key, where) if not acts]
    assert not idle, "accepted, and nothing changes:\n" + "\n".join(idle)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["device=cpu", "serving.gpu_memory_utilization=0.4"], "serving.gpu_memory_utilization=0.4 does nothing without a server on a GPU"),
        (["device=cuda", "serving.kv_cache_gb=2"], "serving.kv_cache_gb=2.0 does nothing without a server on the CPU"),
        (["device=cuda", "serving.threads=2"], "serving.threads=2 does nothing without a server on the CPU"),
        (["device=cuda", "judge_servers.small.threads=2"], "judge_servers.small.threads=2 does nothing without a server on the CPU"),
        (
            ["evaluation.heldout=0", "evaluation.heldout_real=0", "evaluation.attempts=4"],
            "evaluation.attempts=4 does nothing without held-out",
        ),
        (
            ["evaluation.heldout=0", "evaluation.heldout_real=0", "evaluation.every=2"],
            "evaluation.every=2 does nothing without held-out tasks",
        ),
        (
            ["evaluation.heldout=0", "evaluation.heldout_real=0", "evaluation.sampling.temperature=0.5"],
            "evaluation.sampling.temperature=0.5 does nothing",
        ),
        (["evaluation.every=999"], "evaluation.every=999 does nothing without a step between the first and the last"),
        (["evaluation.every=12"], "evaluation.every=12 does nothing"),
        (["tasks.weighting=true", "steps=1"], "does nothing without a step late enough"),
        (["tasks.weighting=true", "steps=2"], "does nothing without a step late enough"),
        (["max_staleness=3", "learner.keep_versions=9", "steps=3"], "max_staleness=3 does nothing"),
        (
            ["learner.lr_schedule=cosine", "steps=2", "learner.warmup_steps=1"],
            "learner.lr_schedule='cosine' does nothing without two steps",
        ),
        (["learner.offload=optimizer", "device=cpu"], "learner.offload='optimizer' does nothing without a learner on a GPU"),
    ],
)
def test_the_error_for_a_key_without_effect_says_what_it_needs(changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        BASE.but(*changes)
    assert message in str(error.value) and "otherwise leave it at" in str(error.value)
