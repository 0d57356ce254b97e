"""Parts that a recipe selects: built-in names, plug-in references, and every error of an object that a reference points to."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import protocols
from agentrl.config import ObjectiveConfig, Part, PolicyConfig, Recipe, TasksConfig
from agentrl.errors import PluginError, RecipeError
from agentrl.objective.advantages import load_estimator
from agentrl.objective.trial import try_estimator
from agentrl.plugins import parts, references
from agentrl.plugins.protocol_checks import protocol_errors, signature_error
from agentrl.sandbox import BubblewrapBackend, DockerBackend
from agentrl.session.preflight import check_parts
from agentrl.testing import ScriptedSandboxes

ROOT = Path(__file__).resolve().parents[2]
BASE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))


@pytest.fixture
def write_module(tmp_path: Path) -> Any:
    """Returns a function that writes a user's module and returns the plug-in reference of a name in it."""

    def write(code: str, attribute: str = "Part") -> str:
        file = tmp_path / "theirs.py"
        file.write_text(code)
        return f"{file}:{attribute}"

    return write


@pytest.mark.parametrize("kind", parts.KINDS, ids=lambda kind: kind.key)
def test_built_in_parts_fulfil_their_protocols(kind: parts.PartKind) -> None:
    """Built-in names and plug-in references are loaded the same way: a name is only a short reference."""
    for name, reference in kind.shipped.items():
        assert parts.check_part(kind, Part(name)) == Part(name)
        if kind is parts.ADVANTAGE or kind is parts.LOSS:
            assert protocol_errors(references.resolve(reference), references.resolve(kind.protocol)) == []
        elif kind is parts.BACKEND:
            assert [protocol_errors(backend, protocols.SandboxBackend) for backend in (BubblewrapBackend, DockerBackend)] == [[], []]
            assert signature_error(references.resolve(reference), root=Path(), run_label="x") == ""
        else:
            assert parts.load_part(kind, Part(reference)) is references.resolve(reference), "it also passes by its full reference"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "sandbox.backend=bublewrap",
            r"unknown sandbox backend; did you mean bubblewrap\? known here: auto, docker",
        ),
        ("sandbox.backend=bwrap", r"unknown sandbox backend; did you mean bubblewrap\?"),
        ("rollout.agent=turn", r"rollout\.agent: unknown agent; did you mean turns\?"),
        ("serving.weight_transfer=ncll", r"unknown weight channel; did you mean nccl\?"),
        ("store=rediss", r"store: unknown experience store; did you mean redis\? known here: sqlite, redis.*module:attr"),
        ('trackers=["terminal", "tensorbord"]', r"trackers\[1\]: unknown tracker; did you mean tensorboard\?"),
        ("objective.advantage=rlo", r"objective\.advantage: unknown advantage estimator; did you mean rloo\?"),
        ("objective.loss=gsp", r"objective\.loss: unknown loss; did you mean gspo"),
    ],
)
def test_a_misspelt_name_raises_when_the_recipe_is_built(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        BASE.but(override)


@pytest.mark.parametrize("kind", parts.KINDS, ids=lambda kind: kind.key)
def test_options_of_a_built_in_part_raise_an_error(kind: parts.PartKind) -> None:
    name = next(iter(kind.shipped))
    value = Part(name, options={"a": 1})
    expected = rf"{re.escape(kind.key)}={name} accepts no options: remove them"
    if kind is parts.STORE:  # it has options
        expected = r"store\.options of store=sqlite: unknown a; the only option is keep_steps"
    if kind is parts.CHANNEL:
        expected = r"serving\.weight_transfer\.options: unknown a; the only option is store"
    with pytest.raises(RecipeError, match=expected):
        BASE.but({kind.key: [value] if kind is parts.TRACKER else value})


STORE = """
from agentrl.experience import SqliteStore
class Part(SqliteStore):
    def __init__(self, run_dir, recipe, *, name="x.sqlite"):
        super().__init__(run_dir / name)
"""


def test_a_user_supplied_store_is_opened_with_the_run_folder_the_recipe_and_its_options(write_module: Any, tmp_path: Path) -> None:
    recipe = BASE.but(store=Part(write_module(STORE), options={"name": "mine.sqlite"}))
    check_parts(recipe)
    store = parts.make_part(parts.STORE, recipe.store, tmp_path, recipe)
    store.close()
    assert (tmp_path / "mine.sqlite").is_file()


BACKEND = """
class Part:
    name = "mine"
    def __init__(self, *, root, run_label, size=1): ...
    async def prepare(self, spec): ...
    async def open(self, spec, *, files=None, snapshot=None, timeout_s=60.0): ...
    async def close(self): ...
"""


BROKEN_STORE = STORE.replace("from agentrl.experience import SqliteStore", "class SqliteStore:\n def put(self, group): ...")
INHERITED, INIT = (
    "from agentrl.protocols import {0}\nclass Part({0}):\n def close(self): ...\n",
    " def __init__(self, run_dir, recipe): ...",
)
TRACKER = "class Part:\n def __init__(self, run_dir, recipe): ...\n def log(self, step, metrics): ..."
CHANNEL = "class Part:\n def __init__(self, server, *, registry_folder): ...\n async def swap(self, version, folder, probe): ..."
UNFIT: list[tuple[str, str, dict[str, Any], str, str]] = [
    (
        "sandbox.backend",
        BACKEND.replace("def open", "def opened"),
        {},
        "it has no method open",
        "`async def open(self, spec: SandboxSpec, *,",
    ),
    (
        "sandbox.backend",
        BACKEND.replace(", timeout_s=60.0", ""),
        {},
        "open cannot be called as required: timeout_s",
        "timeout_s: float = 60",
    ),
    (
        "sandbox.backend",
        BACKEND.replace("(self, spec)", "(self, spec, i)"),
        {},
        "missing a required argument: 'i'",
        "`async def prepare(self,",
    ),
    (
        "sandbox.backend",
        BACKEND.replace("async def close", "def close"),
        {},
        "close is not async, but will be",
        "`async def close(self) -> None`",
    ),
    ("sandbox.backend", BACKEND, {"sice": 3}, "sice: unknown argument; did you mean size?", "takes (*, root, run_label)"),
    ("sandbox.backend", BACKEND.replace("run_label, ", ""), {}, "run_label: unknown argument", "agentrl.protocols.SandboxBackend"),
    (
        "store",
        BROKEN_STORE,
        {},
        "it has no method commit",
        "def commit(self, step: int, uses: Mapping[int, GroupUse], checkpoint: str) -> None",
    ),
    ("store", "Part = 3", {}, "is of type int, which is not callable", "takes (run_dir, recipe)"),
    ("store", "def Part(run_dir, recipe): ...", {}, "has no return annotation", "annotate it with the class that it returns"),
    ("store", "async def Part(run_dir, recipe): ...", {}, "is async, but is called without await", "takes (run_dir, recipe)"),
    ("store", "def Part(run_dir, recipe) -> dict: ...", {}, "class dict does not implement", "def put(self, group: Group) -> bool"),
    ("trackers", INHERITED.format("Tracker"), {}, "run_dir", "takes (run_dir, recipe)"),
    ("store", INHERITED.format("ExperienceStore") + INIT, {}, "it has no method put; it has no method has;", "`def has(self, index: int)"),
    ("trackers", TRACKER, {}, "it has no method alert; ", "`def alert(self, text: str) -> None`"),
    ("serving.weight_transfer", CHANNEL, {}, "swap cannot be called as required: max_abs_diff", "`async def close(self) -> None`"),
    ("objective.advantage", "def Part(): ...", {}, "too many positional arguments", "(self, groups: Sequence[Sequence[float]])"),
    ("objective.advantage", "async def Part(groups): ...", {}, "is async, but is called without await", "def __call__"),
    ("objective.advantage", "class Part:\n def __call__(self, groups): ...", {}, "it is a class", "refer to an instance"),
    ("objective.loss", "def Part(tokens, *, width): ...", {}, "missing a required", "(self, tokens: LossTokens)"),
    ("objective.loss", "def Part(tokens, *, width): ...", {"widht": 1}, "widht: unknown argument; did you mean width", "LossTokens"),
]


@pytest.mark.parametrize(("key", "code", "options", "message", "fix"), UNFIT)
def test_a_part_that_does_not_fulfil_its_protocol_raises_with_the_fix(
    key: str, code: str, options: dict[str, Any], message: str, fix: str, write_module: Any
) -> None:
    reference = write_module(code)
    part = Part(reference, options=options)
    with pytest.raises(PluginError) as error:
        check_parts(BASE.but({key: [part] if key == "trackers" else part}))
    assert key in error.value.message and message in error.value.message, error.value.message
    assert fix in error.value.fix, error.value.fix


def test_all_problems_are_reported_at_once(write_module: Any) -> None:
    reference = write_module("x = 1", "absent")
    with pytest.raises(PluginError) as error:
        check_parts(BASE.but(f"store={reference}", "objective.loss=nowhere.at_all:loss", f'trackers=["{reference}"]'))
    for text in ("store: ", "trackers: ", "has no attribute 'absent'", "objective.loss: 'nowhere.at_all:loss': no module named 'nowhere'"):
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [[0.0] * len(g) for g in groups[:-1]]", "3 groups need 3 lists, not a list of 2"),
        ("return [[0.0] for g in groups]", "group 0 of 4 scores needs 4 advantages, not a list of 1"),
        ("return 0.5", "3 groups need 3 lists, not a value of type float"),
        ("return [['0'] * len(g) for g in groups]", "group 0 contains a str of 1 instead of a float"),
        ("return [[(s - sum(g) / len(g)) / (max(g) - min(g)) for s in g] for g in groups]", "it raised ZeroDivisionError"),
        ("return [[float('nan')] * len(g) for g in groups]", "which is not finite"),
        ("import random; return [[random.random() for _ in g] for g in groups]", "make it a pure function"),
        ("raise SystemExit(3)", "it raised SystemExit"),
    ],
)
def test_an_estimator_is_tried_on_a_tiny_step(body: str, message: str, write_module: Any) -> None:
    objective = BASE.but(f"objective.advantage={write_module(f'def Part(groups):{chr(10)} {body}')}").objective
    with pytest.raises(PluginError, match=r"objective\.advantage .*tried on the scores \[\[0\.0, 1\.0, 0\.0, 1\.0\], \[1\.0") as error:
        try_estimator(objective, group_size=4)
    assert message in str(error.value)


LOSSES = [
    ("return tokens.log_ratio.exp() * tokens.advantages", "returned a Tensor"),
    ("return (tokens.advantages.sum(), tokens.advantages > 0)", "returned shapes [] and [5] for [5] tokens"),
    ("return (tokens.log_ratio * 2, tokens.advantages)", "returned types torch.float32 and torch.float32"),
    ("return (tokens.log_ratio / tokens.log_ratio.new_zeros(()), tokens.advantages > 0)", "which is not finite"),
    ("return (tokens.log_ratio.detach() * tokens.advantages, tokens.advantages > 0)", "its term does not depend on the policy"),
    ("return (tokens.log_ratio[:, 0], tokens.advantages > 0)", "it raised IndexError"),
    ("return ((tokens.log_ratio - tokens.log_ratio.detach()).abs().sqrt(), tokens.advantages > 0)", "its gradient is"),
    ("x = tokens.log_ratio; return (x - x.max(), x > 0)", "tried on 0 tokens: it raised"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), LOSSES)
def test_a_loss_is_tried_on_a_few_tokens_and_on_none(body: str, message: str, write_module: Any) -> None:
    from agentrl.objective.trial import try_loss

    objective = BASE.but(f"objective.loss={write_module(f'def Part(tokens):{chr(10)} {body}')}").objective
    with pytest.raises(PluginError, match=r"objective\.loss") as error:
        try_loss(objective)
    assert message in str(error.value), str(error.value)


@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce++", "reinforce++-baseline"])
def test_built_in_losses_and_estimators_pass_their_trials(loss: str, advantage: str) -> None:
    from agentrl.objective.trial import try_loss

    objective = ObjectiveConfig(loss=loss, advantage=advantage)
    try_estimator(objective, group_size=8)
    try_loss(objective)


def test_a_factory_with_a_wrong_annotation_raises_when_it_is_called(write_module: Any, tmp_path: Path) -> None:
    code = "from agentrl.protocols import ExperienceStore\ndef Part(run_dir, recipe) -> ExperienceStore:\n return 3"
    reference = write_module(code)
    check_parts(BASE.but(f"store={reference}"))
    with pytest.raises(PluginError, match="its result, of class int, does not implement"):
        parts.make_part(parts.STORE, Part(reference), tmp_path, BASE)


def test_an_exception_of_a_factory_is_reported_with_its_location(write_module: Any, tmp_path: Path) -> None:
    reference = write_module(STORE + "        raise KeyError('REDIS_URL')\n")
    with pytest.raises(PluginError, match=r"store .* could not be opened: KeyError: 'REDIS_URL' \(.*theirs\.py:6\)"):
        parts.make_part(parts.STORE, Part(reference), tmp_path, BASE)


@pytest.mark.slow
def test_a_wrong_reference_ends_the_command_at_once_with_exit_code_2(tmp_path: Path) -> None:
    """It ends before a model is read, a sandbox is opened or torch is imported."""
    started = time.monotonic()
    command = [sys.executable, "-m", "agentrl", "train", "recipes/quickstart.py", "store=agentrl.records:Group", "--run-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert re.search(
        r"store 'agentrl\.records:Group' cannot be called with .*\n  fix: refer to a class or function that takes \(run_dir, recipe\)",
        result.stderr,
    )
    assert time.monotonic() - started < 10, "it takes 3 s on an idle machine"
    assert not (tmp_path / "recipe.json").exists()


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), max_size=5))
def test_a_plug_in_estimator_returns_what_the_built_in_one_returns(scores: list[list[float]]) -> None:
    estimator = parts.load_part(parts.ADVANTAGE, Part("agentrl.objective.advantages:rloo", options={"normalize_std": True}))
    assert estimator(scores) == load_estimator(ObjectiveConfig(advantage="rloo", normalize_std=True))(scores)


async def test_a_backend_with_only_the_methods_of_the_protocol_is_pooled() -> None:
    from agentrl.records import ExecResult, SandboxSpec
    from agentrl.sandbox import WarmPool

    inner = ScriptedSandboxes(lambda code: ExecResult(exit_code=0, stdout=code, stderr="", wall_s=0.0))
    pool = WarmPool(inner, warm=1, max_open=1)
    spec = SandboxSpec(image="i")
    await pool.prepare(spec)
    first = await pool.open(spec, files={"a": b"1"})
    assert (await first.read("a", max_bytes=9), pool.name) == (b"1", inner.name)
    waiting = asyncio.create_task(pool.open(spec, timeout_s=5.0))
    await asyncio.sleep(0.02)
    assert not waiting.done(), "only one sandbox may be in use"
    await first.close()
    second = await waiting
    assert (await second.python("x", timeout_s=1.0)).stdout == "x"
    await pool.close()


def test_a_tracker_that_raises_loses_only_its_own_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from agentrl.observe import RunTracker

    class Bad(protocols.Tracker):
        def log(self, step: int, metrics: Any) -> None:
            raise ConnectionError("no route to the dashboard")

    events: list[Any] = []
    good = SimpleNamespace(log=lambda *logged: events.append(logged), close=lambda: events.append("closed"))
    tracker = RunTracker(tmp_path, [Bad(), good])  # type: ignore[list-item]  # has only two of the methods
    tracker.log(1, {"loss": 0.5})
    tracker.close()
    assert events == [(1, {"loss": 0.5}), "closed"] and "tracker Bad: ConnectionError: no route" in caplog.text
    assert '"loss": 0.5' in (tmp_path / "metrics.jsonl").read_text()


def test_an_entry_point_is_a_name_in_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: somebody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentrl.plugins]\nbest-of-group = somebody_elses:best\nbroken = somebody_elses:absent\n")
    (tmp_path / "somebody_elses.py").write_text("def best(groups):\n return [[s - max(g) for s in g] for g in groups]\n")
    with pytest.raises(RecipeError, match="unknown advantage estimator"):
        BASE.but("objective.advantage=best-of-group")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = BASE.but("objective.advantage=best-of-group")
    check_parts(recipe)
    assert parts.load_part(parts.ADVANTAGE, recipe.objective.advantage)([[1.0, 0.0]]) == [[0.0, -1.0]]
    with pytest.raises(RecipeError, match=r"did you mean best-of-group\? known here: sqlite, redis, best-of-group, broken"):
        BASE.but("store=best-of-groups")
    with pytest.raises(PluginError, match=r"objective\.loss: .*absent"):
        check_parts(BASE.but("objective.loss=broken"))
