"""Proofs about an environment: equal seeds and actions give equal episodes, episodes share no state, an episode can be continued from a
snapshot, and rewards are in the declared range. Also compares baselines."""

from __future__ import annotations

import asyncio
import inspect
import random
import textwrap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, cast

from agentrl.base import user_code
from agentrl.base.numbers import plural
from agentrl.check.report import Finding, Proof, shorten_difference
from agentrl.environment import close_environments, is_resumable, open_environment
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault, TaskError
from agentrl.plugins.references import resolve
from agentrl.protocols import Environment, ResumableEnvironment, RoleEnvironment
from agentrl.records import EnvironmentSpec, Observation, Step, Task, ToolCall
from agentrl.records.images import REFERENCE

SEEDS = 16
"""Maximum number of seeds that are played."""
FRESH = 4
"""Number of seeds that are each played in a new process."""
_SHOWN = 1000  # maximum number of characters of an observation in the report
Action = str | ToolCall
Actor = Callable[[Environment, str], Action]
"""Returns an action for an environment and its last observation."""

NOT_PROVEN = (
    "that other seeds and longer episodes behave like the episodes that were played",
    "that a policy cannot earn the reward in a way that you did not intend",
    "that episodes are the same on another machine, with different packages, or on another day",
)


@dataclass(frozen=True, slots=True)
class Played:
    """An episode: its actions, and each observation (including the first) with its reward and flags."""

    actions: tuple[Action, ...]
    steps: tuple[tuple[str, float, bool, bool], ...]

    @property
    def total(self) -> float:
        """The sum of the rewards."""
        return sum(step[1] for step in self.steps)

    @property
    def end(self) -> str:
        """Why the episode ended."""
        _, _, terminated, truncated = self.steps[-1]
        return "terminated" if terminated else "truncated" if truncated else "reached the limit of turns"


async def prove_environment(tasks: Sequence[Task]) -> list[Proof]:
    """Plays episodes in the environments of at most `SEEDS` of these tasks, and returns the proofs about them. At least one task must have
    an environment. Faults of an environment become findings. Raises `TaskError` or `PluginError` if the first task cannot be played."""
    tasks = [task for task in tasks if task.environment is not None][:SEEDS]
    try:
        first = await _open(_spec(tasks[0]))
    except EnvironmentFault as error:
        finding = Finding(severity="failure", what=f"{_spec(tasks[0]).ref} does not start: {error}", tasks=(tasks[0].id,))
        return [Proof(name="episodes can be played", looked_at="1 seed", findings=(finding,))]
    try:
        first_turn = await _first_turn(first)
    finally:
        await first.close()
    actions = first.actions
    if first_turn.severity == "failure":
        return [Proof(name="episodes can be played", looked_at="1 seed", findings=(replace(first_turn, tasks=(tasks[0].id,)),))]
    if actions is None and _expert(_spec(tasks[0])) is None:
        return [Proof(name="episodes can be played", looked_at="nothing", findings=(first_turn,), unproven=(_NO_ACTOR,))]
    resumable = is_resumable(first)
    played: dict[str, Played] = {}
    proofs = [
        await _proof("episodes can be played", tasks, lambda task: _play_first(task, played)),
        await _proof("equal seeds and actions give equal episodes", tasks, lambda task: _again(task, played)),
        await _proof("concurrent episodes share no state", tasks, lambda task: _interleaved(task, tasks, played)),
        await _proof("reset restarts an unfinished episode", tasks, lambda task: _after_half(task, played)),
    ]
    if resumable:
        proofs.append(await _proof("a snapshot continues an episode", tasks, lambda task: _from_snapshot(task, played)))
    proofs[0] = replace(proofs[0], findings=(*proofs[0].findings, first_turn))
    return [*proofs, _reward_range(tasks, played), await _baselines(tasks, played, random_baseline=actions is not None)]


_NO_ACTOR = "anything about episodes: an action is any text, and the class has no method expert(observation) that returns one"


async def _first_turn(environment: Environment) -> Finding:
    """Returns a note with the instructions, the first observation and the actions, or a failure if the reset fails."""
    observation = ""
    with user_code.fault_boundary() as fault:
        observation = REFERENCE.sub("<image>", (await environment.reset()).text)
    if fault.error is not None:
        return Finding(severity="failure", what=_fault_text(fault.error))
    names = [action if isinstance(action, str) else f"{action['function']['name']}(...)" for action in environment.actions or ()]
    sections = (environment.instructions, observation, f"Allowed actions: {', '.join(names) or 'any text'}")
    text = "\n\n".join(user_code.clip(section, _SHOWN) for section in sections if section)
    return Finding(severity="note", what="first turn:\n" + textwrap.indent(text, "    "))


def _fault_text(error: BaseException) -> str:
    known = isinstance(error, EnvironmentFault | TaskError | PluginError)
    return user_code.error_text(error, 500) if known else user_code.describe_error(error, 500)


async def _proof(name: str, tasks: Sequence[Task], check: Callable[[Task], Awaitable[str]]) -> Proof:
    """Returns the proof of a claim. `check` returns the problem with a task, or an empty string if there is none. Tasks whose problems
    differ only after the first colon share a finding, which shows the problem with the first of these tasks."""
    wrong: dict[str, tuple[str, list[str]]] = {}
    for task in tasks:
        problem = ""
        with user_code.fault_boundary() as fault:
            problem = await check(task)
        if fault.error is not None:
            problem = _fault_text(fault.error)
        if problem:
            wrong.setdefault(problem.partition(":")[0], (problem, []))[1].append(task.id)
    findings = tuple(Finding(severity="failure", what=problem, tasks=tuple(ids)) for problem, ids in wrong.values())
    return Proof(name=name, looked_at=plural(len(tasks), "seed"), findings=findings)


async def _play_first(task: Task, played: dict[str, Played]) -> str:
    """Plays an episode with random actions, or, if any text is a valid action, with the expert's actions. Plays each of the first `FRESH`
    seeds in a new process."""
    if len(played) < FRESH:
        await close_environments()
    expert = _expert(_spec(task))
    draw = random.Random(task.id)
    played[task.id] = await _play(
        task, lambda environment, seen: _draw(environment, draw) if environment.actions else cast(Actor, expert)(environment, seen)
    )
    return ""


async def _again(task: Task, played: Mapping[str, Played]) -> str:
    return _difference(played[task.id], await _repeat(task, played[task.id])) if task.id in played else ""


async def _interleaved(task: Task, tasks: Sequence[Task], played: Mapping[str, Played]) -> str:
    """Repeats two episodes concurrently."""
    other = tasks[(tasks.index(task) + 1) % len(tasks)]
    if task.id not in played or other.id not in played:
        return ""
    first, second = await asyncio.gather(_again(task, played), _again(other, played))
    return first or second


async def _after_half(task: Task, played: Mapping[str, Played]) -> str:
    if task.id not in played:
        return ""
    await _repeat(task, played[task.id], most=max(1, len(played[task.id].actions) // 2))
    return await _again(task, played)


async def _from_snapshot(task: Task, played: Mapping[str, Played]) -> str:
    """Continues an episode from a snapshot in a second environment."""
    if task.id not in played:
        return ""
    wanted = played[task.id]
    half = len(wanted.actions) // 2
    environment = await _open(_spec(task))
    try:
        await environment.reset()
        for action in wanted.actions[:half]:
            await _step(environment, action)
        state = await cast(ResumableEnvironment, environment).snapshot()
    finally:
        await environment.close()
    other = await _open(_spec(task))
    try:
        restored = (await cast(ResumableEnvironment, other).restore(state)).text
        rest = [(restored, *wanted.steps[half][1:])]
        for action in wanted.actions[half:]:
            rest.append(_seen(await _step(other, action)))
    finally:
        await other.close()
    return _difference(wanted, Played(wanted.actions, (*wanted.steps[:half], *rest)))


def _reward_range(tasks: Sequence[Task], played: Mapping[str, Played]) -> Proof:
    totals = [episode.total for episode in played.values()]
    declared = getattr(_class(_spec(tasks[0])), "rewards", None)
    if not totals:
        return Proof(name="rewards are in their range", looked_at="no episode")
    observed = f"{plural(len(totals), 'episode')}, sums from {min(totals):g} to {max(totals):g}"
    if declared is None:
        unproven = ("the range of an episode's rewards: the class declares none (rewards = (smallest, largest))",)
        return Proof(name="rewards are in their range", looked_at=observed, unproven=unproven)
    if not _is_range(declared):
        what = f"rewards must be two numbers, the smallest and the largest reward of an episode, got {declared!r:.80}"
        return Proof(name="rewards are in their range", looked_at=observed, findings=(Finding(severity="failure", what=what),))
    outside = [name for name, episode in played.items() if not declared[0] <= episode.total <= declared[1]]
    what = f"the rewards of an episode add up to a value outside the declared range {declared[0]:g} to {declared[1]:g}"
    findings = (Finding(severity="failure", what=what, tasks=tuple(outside)),) if outside else ()
    return Proof(name="rewards are in their range", looked_at=observed, findings=findings)


def _is_range(value: Any) -> bool:
    numbers = isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(bound, int | float) for bound in value)
    return numbers and value[0] <= value[1]


async def _baselines(tasks: Sequence[Task], played: Mapping[str, Played], *, random_baseline: bool) -> Proof:
    """Compares random actions with the expert's actions."""
    rows: dict[str, list[Played]] = {"random": list(played.values())} if random_baseline else {}
    expert, findings = _expert(_spec(tasks[0])), []
    if expert is not None:
        with user_code.fault_boundary() as fault:
            rows["expert"] = [await _play(task, expert) for task in tasks]
        if fault.error is not None:
            findings.append(Finding(severity="failure", what=f"the expert failed: {user_code.describe_error(fault.error, 500)}"))
    if len(rows) == 2 and all(rows.values()) and fmean(e.total for e in rows["expert"]) <= fmean(e.total for e in rows["random"]):
        findings.append(Finding(severity="warning", what="the expert earns no more than random actions"))
    if rows.get("random") and all(not any(episode.steps[-1][2:]) for episodes in rows.values() for episode in episodes):
        what = f"no episode ended within limits.turns={tasks[0].limits.turns}"
        findings.append(Finding(severity="warning", what=what))
    table: list[tuple[str, ...]] = [("actions", "episodes", "mean reward", "smallest", "largest", "mean steps", "terminated")]
    for name, episodes in rows.items():
        totals = [episode.total for episode in episodes] or [0.0]
        ends = sum(episode.end == "terminated" for episode in episodes)
        steps = fmean(len(episode.actions) for episode in episodes) if episodes else 0.0
        table.append((name, *(f"{n:g}" for n in (len(episodes), fmean(totals), min(totals), max(totals), steps)), str(ends)))
    unproven = () if expert is not None else ("that the tasks can be solved: the class has no method expert(observation)",)
    return Proof(name="baselines", looked_at=" and ".join(rows), findings=tuple(findings), unproven=unproven, table=tuple(table))


class OneActor:
    """Adapts a game with several roles to one agent, which acts for each role in turn. The reward is the first role's reward."""

    def __init__(self, game: RoleEnvironment) -> None:
        self.instructions, self._game = game.instructions, game
        self._waiting: dict[str, Observation] = {}
        self._actions: dict[str, str] = {}

    @property
    def actions(self) -> Sequence[str] | None:
        """The allowed actions of the role that acts next."""
        legal = next(iter(self._waiting.values())).actions if self._waiting else ()
        return legal or cast(Sequence[str] | None, self._game.actions)

    async def reset(self) -> Observation:
        """Starts the game."""
        self._waiting = dict(await self._game.reset())
        return self._next(self._waiting)

    async def step(self, action: str | ToolCall) -> Step:
        """Stores the action of the next role. Applies the stored actions once all roles that act at the same time have acted."""
        assert isinstance(action, str), "the actions of games are strings"
        role = next(iter(self._waiting))
        del self._waiting[role]
        self._actions[role] = action
        if self._waiting:
            return Step(observation=self._next(self._waiting))
        actions, self._actions = self._actions, {}
        step = await self._game.step(actions)
        self._waiting = {} if step.done else dict(step.observations)
        observations = self._next(
            {**step.observations, **{role: Observation(text=str(gain)) for role, gain in sorted(step.rewards.items())}}
        )
        reward = step.rewards.get(self._game.roles[0], 0.0)
        return Step(observation=observations, reward=reward, terminated=step.terminated, truncated=step.truncated)

    async def close(self) -> None:
        """Closes the game."""
        await self._game.close()

    def _next(self, observations: Mapping[str, Observation]) -> Observation:
        return Observation(text="; ".join(f"{role}: {item.text}" for role, item in observations.items()))


async def _open(spec: EnvironmentSpec) -> Environment:
    """Returns the environment of a task. If the environment is a game with several roles, one actor plays all of them."""
    environment: Any = await open_environment(spec)
    if getattr(environment, "policy_user", ""):
        environment.play_user(lambda brief, dialogue: "Go on.")  # no policy is running to play the user
    if not getattr(environment, "roles", ()):
        return cast(Environment, environment)
    return cast(Environment, OneActor(environment))


def _spec(task: Task) -> EnvironmentSpec:
    assert task.environment is not None, "only such tasks are played"
    return task.environment


async def _play(task: Task, actor: Actor, *, most: int | None = None) -> Played:
    """Plays an episode of at most `most` steps; None means the task's limit on turns."""
    environment = await _open(_spec(task))
    try:
        observation = (await environment.reset()).text
        actions: list[Action] = []
        steps = [(observation, 0.0, False, False)]
        while len(actions) < (task.limits.turns if most is None else most) and not any(steps[-1][2:]):
            actions.append(actor(environment, steps[-1][0]))
            steps.append(_seen(await _step(environment, actions[-1])))
        return Played(tuple(actions), tuple(steps))
    finally:
        await environment.close()


async def _repeat(task: Task, played: Played, *, most: int | None = None) -> Played:
    actions = iter(played.actions[:most])
    return await _play(task, lambda environment, observation: next(actions), most=len(played.actions[:most]))


async def _step(environment: Environment, action: Action) -> Step:
    try:
        return await environment.step(action)
    except PolicyFault as error:
        return Step(observation=Observation(text=f"error: {error}"))


def _seen(step: Step) -> tuple[str, float, bool, bool]:
    return step.observation.text, step.reward, step.terminated, step.truncated


def _difference(wanted: Played, got: Played) -> str:
    """Returns a description of the first difference between two episodes with the same seed and actions; empty if they are equal."""
    for number, (one, other) in enumerate(zip(wanted.steps, got.steps, strict=False)):
        for what, before, after in zip(("observation", "reward", "terminated", "truncated"), one, other, strict=True):
            if before != after:
                first, second = shorten_difference(str(before), str(after))
                when = f"after {plural(number, 'equal action')}" if number else "after a reset with the same seed"
                return f"{what} differs: {first} and {second}, {when}"
    return "" if len(wanted.steps) == len(got.steps) else "equal actions gave different numbers of steps"


def _class(spec: EnvironmentSpec) -> Any:
    with user_code.fault_boundary():
        return resolve(spec.ref)
    return None


def _expert(spec: EnvironmentSpec) -> Actor | None:
    """Returns the scripted policy of a user-supplied environment; None if the environment has none."""
    expert = getattr(_class(spec), "expert", None)
    if not callable(expert) or not inspect.isclass(_class(spec)):
        return None
    return lambda environment, observation: cast(Action, expert(observation))


def _draw(environment: Environment, draw: random.Random) -> Action:
    """Returns a random action."""
    action: Any = draw.choice(list(environment.actions or ()))
    if isinstance(action, str):
        return action
    function = action["function"]
    return ToolCall(name=function["name"], arguments=_value(function["parameters"], draw))


def _value(schema: Mapping[str, Any], draw: random.Random) -> Any:
    """Returns a random value for a JSON schema with common keywords."""
    if "enum" in schema:
        return draw.choice(list(schema["enum"]))
    low, high = schema.get("minimum", -10), schema.get("maximum", 10)
    match schema.get("type"):
        case "object":
            return {name: _value(part, draw) for name, part in schema.get("properties", {}).items()}
        case "array":
            count = draw.randint(schema.get("minItems", 0), min(schema.get("maxItems", 3), 64))
            return [_value(schema.get("items", {}), draw) for _ in range(count)]
        case "integer":
            return draw.randint(int(low), int(high))
        case "number":
            return draw.uniform(low, high)
        case "boolean":
            return draw.random() < 0.5
    return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, 8)))
