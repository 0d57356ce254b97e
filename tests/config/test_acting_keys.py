"""Every key of a recipe acts, or is refused: over all keys, as the sections have them.

Recipes of a pool stand for what people write, with each part of a run switched on in one of them and off in another. Three things hold
for every key: code reads it; some recipe of the pool takes another value than its default; and one that its annotation declares to be
idle somewhere (`Needs`) is refused there by name. Keys whose effect can be computed without a machine are held to more: a value that
is accepted changes the effect, in whatever recipe.
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
    "as it is": {},
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
        key, inner, several = f"{path}{name}", section_of(field.annotation), named_section_of(field.annotation)
        conditions = (*inherited, *((one, key) for one in field.metadata if isinstance(one, Needs)))
        optional = inner is not None and field.get_default(call_default_factory=True) is None
        if optional or (inner is None and several is None):  # that a section is switched on is a setting, too
            CONDITIONS[key] = conditions
            yield key, field
        if below := inner or several:
            yield from keys(below, f"{key}.*." if several else f"{key}.", () if optional or several else conditions)


CONDITIONS: dict[str, tuple[tuple[Needs, str], ...]] = {}
"""What a key needs to act, each with the key that declares it: itself, or its section."""
KEYS = dict(keys())
NAMES = {"judge_servers": "small", "mcp": "far", "tools": "t"}


def concrete(key: str) -> str:
    """The key with the name that the pool's recipes have in place of `*`."""
    before, star, after = key.partition(".*.")
    return f"{before}.{NAMES[before]}.{after}" if star else key


def owner(recipe: Recipe, key: str) -> Any:
    """The section that has a key; None where the recipe has none."""
    found: Any = recipe
    for part in concrete(key).split(".")[:-1]:
        found = found.get(part) if isinstance(found, dict) else getattr(found, part)
        if found is None:
            return None
    return found


GIVEN: dict[str, tuple[Any, ...]] = {
    # Where the type does not say which values make sense.
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
    """Values of a key's type other than `value`, which it has, and its default."""
    usual = field.get_default(call_default_factory=True)
    for one in GIVEN.get(key) or (candidate for kind in kinds(field.annotation) for candidate in of_kind(kind, value, field)):
        if one not in (value, usual):
            yield one


def kinds(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from kinds(typing.get_args(annotation)[0])
    elif origin in (types.UnionType, typing.Union):
        for one in typing.get_args(annotation):
            yield from kinds(one)
    else:
        yield annotation


def of_kind(kind: Any, value: Any, field: Any) -> Iterator[Any]:
    if typing.get_origin(kind) is Literal:
        yield from typing.get_args(kind)
    elif isinstance(kind, type) and issubclass(kind, Section):
        yield from ({}, {"suite": "s"})
    elif kind is bool:
        yield not value
    elif kind in (int, float):
        now = value if isinstance(value, int | float) else 1
        for one in (2 * now, now + 1, now - 1, now / 2, now + 0.25, 2, 3, 0.5, 0.75, 0.9, 64):
            if kind is float or one == int(one):
                yield kind(one)
    elif typing.get_origin(kind) is tuple:
        yield from ((4,),) if int in typing.get_args(kind) else (("x.y:z",),)
    elif kind in (str, Part):
        yield "x.y:z"


def accepted(recipe: Recipe, key: str) -> Iterator[tuple[Recipe, Any]]:
    """The recipe with other values of a key that it takes."""
    section = owner(recipe, key)
    if section is None:
        return
    for value in others(key, KEYS[key], getattr(section, key.rpartition(".")[2])):
        try:
            made = recipe.but({concrete(key): value})
        except RecipeError:
            continue
        if made != recipe:
            yield made, value


@cache
def read_names() -> frozenset[str]:
    """Names of attributes that the product reads, but for the sections' own checks, and of those that are fetched by their name."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parts[len(PACKAGE.parts)] in ("sections", "section.py", "gating.py", "recipe.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_read_and_can_be_set(key: str) -> None:
    name = key.rpartition(".")[2]
    if key == "rollout.delegation":  # read by what sections make of it
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
    for needs, declared in CONDITIONS[key]:
        refused = 0
        for where, recipe in pool().items():
            if (section := owner(recipe, key)) is None:
                continue
            for value in others(key, field, getattr(section, name)):
                try:
                    made = recipe.but({concrete(key): value})
                except RecipeError as error:
                    refused += any(
                        line.partition(f"{concrete(key)}=")[2] and f" does nothing without {needs.what}; or leave it at" in line
                        for line in str(error).splitlines()
                    )
                    continue
                assert needs.holds(made, owner(made, declared)), (
                    f"{where}: {key}={value!r} is taken, and its own declaration says that it is idle"
                )
        assert refused, f"no recipe of the pool refuses {key} without {needs.what}"


def effects(recipe: Recipe, device: str) -> dict[str, Any]:
    """What a run would do, as far as that can be computed here: commands and environments of servers, evaluations, learning rates."""
    found: dict[str, Any] = {}
    folder = Path("/nowhere")
    server = VLLMServer(recipe=recipe, model=folder, version=0, run_dir=folder)
    serving = recipe.serving
    server._threads = (serving.threads or 7) if device == "cpu" else None
    found["server"] = (server._command(), server._environment(), serving.replicas)
    for name, config in recipe.judge_servers.items():
        judge = JudgeServer(name, config, model=folder, reward_model=False, folder=folder, device=device)
        found[f"judge {name}"] = (judge._command(), judge._environment())
    found["evaluations"] = list(evaluations(recipe))
    found["rates"] = [learning_rate(recipe.learner, recipe.step_limit, step) for step in range(recipe.steps or 16)]
    found["sandboxes"] = recipe.sandbox.max_open
    found["lag"] = min(recipe.max_staleness, recipe.step_limit - 1)
    return found


def evaluations(recipe: Recipe) -> Iterator[Any]:
    """The episodes of all evaluations of a run, as they are sampled; a gate samples its cases in the same way."""
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


USUAL = ("as it is", "cpu", "gpu", "sampled evaluation")


def tried(key: str, where: str) -> Iterator[tuple[Any, bool]]:
    """Values of a key that a recipe of the pool takes, and whether any computed effect is another one then, on some device."""
    for made, value in islice(accepted(pool()[where], key), 4):
        yield value, everywhere(made) != unchanged(where)


def everywhere(recipe: Recipe) -> list[dict[str, Any]]:
    """The effects on each device that the recipe may run on."""
    return [effects(recipe, device) for device in (("cpu", "cuda") if recipe.device == "auto" else (recipe.device,))]


@cache
def unchanged(where: str) -> list[dict[str, Any]]:
    return everywhere(pool()[where])


@pytest.mark.slow
def test_what_acts_in_one_recipe_acts_in_every_recipe_that_takes_it() -> None:
    """A key whose effect shows in the computed ones may not be accepted where they stay as they are."""
    acting = {key for key in KEYS if key not in ("device", "gate") and any(acts for where in USUAL for _, acts in tried(key, where))}
    assert acting >= {"serving.kv_cache_gb", "evaluation.every", "learner.lr_schedule", "judge_servers.*.threads"}
    silent = [f"{key}={value!r} in {where!r}" for key in sorted(acting) for where in POOL for value, acts in tried(key, where) if not acts]
    assert not silent, "accepted, and nothing changes:\n" + "\n".join(silent)


@pytest.mark.parametrize(
    ("changes", "said"),
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
def test_what_does_nothing_is_an_error_that_says_what_would_make_it_act(changes: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as error:
        BASE.but(*changes)
    assert said in str(error.value) and "or leave it at" in str(error.value)
