"""Several agents in one environment. Each role is played by the policy in training, a past version of the policy, or a function, which may
call an endpoint.

Each role has a trajectory named after it. If the trained policy does not play a role, the role's turns have a message but no tokens, so
they are not trained and have no staleness. The rewards that a role receives after an action are recorded with the observation that follows
the action.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

from agentrl.agent.agent_environment import check_roles, environment_prompt
from agentrl.agent.chat import ChatFormat
from agentrl.agent.contexts import refer_observation
from agentrl.agent.policy_roles import NoMove, Prompt, TrainedPlayer
from agentrl.base import user_code
from agentrl.base.user_code import clip
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault, TaskError
from agentrl.gateway.constraint import choice_constraint
from agentrl.plugins.references import resolve
from agentrl.protocols import League, LiveEpisode, LiveTrajectory, Opponent, RoleEnvironment
from agentrl.records import Blame, Completion, Failure, Message, Observation, SamplingParams, Task, ToolResult
from agentrl.records.chat import USER
from agentrl.records.sampling import Sampling

CURRENT, LEAGUE = "current", "league"
FUNCTION_S = 120.0
"""Maximum seconds for one move by a function."""
OPPONENT_S = 120.0
"""Maximum seconds for one move by a past version."""

PlayerFunction = Callable[[str, Sequence[str], Sequence[str]], Any]
"""Receives its role, the observations so far and the allowed actions (empty if any text is allowed). Returns its action, or an awaitable
that returns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Players:
    """An `agentrl.protocols.Agent` for environments with several roles.

    Args:
        players: role -> `current` (the policy in training, the default), `league` (a past version of it), or the plug-in reference of a
            `PlayerFunction`.
        opponent: `league` or a plug-in reference. In a `share` of the tasks, the opponent plays all roles that `players` does not assign,
            except one, which is drawn at random for the trained policy. Without an opponent, the trained policy plays all of these roles.
        share: fraction of the tasks that have an opponent. Either all attempts at a task have an opponent, or none do.
        sampling: distribution from which past versions sample.

    Raises:
        UserError: the chat template cannot be extended by user messages.
        PluginError: an option is invalid.
    """

    chat: ChatFormat
    players: Mapping[str, str] = field(default_factory=dict)
    opponent: str | None = None
    share: float = 0.5
    sampling: Sampling = field(default_factory=Sampling)
    league: League | None = None
    instructions: str | None = None

    boundaries = False
    task_tools = False

    def __post_init__(self) -> None:
        self.chat.check_user_turns()
        if not isinstance(self.share, int | float) or not 0 < self.share <= 1 or (self.opponent is None and self.share != 0.5):
            raise PluginError(
                f"rollout.agent.options.share={self.share!r} must be above 0 and at most 1, and requires an opponent",
                fix="set 0 < share <= 1, and set opponent",
            )
        if self.opponent == CURRENT or not isinstance(self.players, Mapping):
            raise PluginError(
                "rollout.agent.options: opponent must not be `current`, and players must be a mapping",
                fix="use a different opponent, or map roles to players",
            )
        for name in self.named:
            if name not in (CURRENT, LEAGUE) and not callable(resolve(name)):
                raise PluginError(
                    f"rollout.agent.options: {name!r} is not a function", fix="refer to a function (role, observations, actions)"
                )

    @property
    def named(self) -> tuple[str, ...]:
        """The players that the options select."""
        return (*self.players.values(), *(() if self.opponent is None else (self.opponent,)))

    async def act(self, episode: LiveEpisode) -> str:
        """Plays one episode, and returns why it ended. Raises `PluginError` if the options do not fit the environment, `TaskError` if a
        past version is needed but there is no league, and `EnvironmentFault` if the environment or a player fails."""
        environment = cast(RoleEnvironment, await episode.environment())
        check_roles(environment, "players")
        if episode.task.environment is not None and episode.task.environment.context_turns is not None:
            raise PluginError("context_turns has no effect with rollout.agent=players: each role has one context", fix="remove the option")
        if episode.turn_count:
            raise EnvironmentFault("a game cannot be resumed; it restarts")
        async with AsyncExitStack() as stack:
            untrained = await self._untrained(episode.task, environment.roles, stack)
            match = Match(self, episode, environment, untrained)
            ended = await match.play()
        if self.league is not None and match.version >= 0:  # a game in which the trained policy made no move does not measure it
            for player, gain in match.gains():
                self.league.record(player.number, gain, version=match.version)
        return ended

    async def _untrained(self, task: Task, roles: Sequence[str], stack: AsyncExitStack) -> dict[str, Opponent | str]:
        """Returns a mapping role -> player for the roles that the trained policy does not play."""
        if unknown := sorted(set(self.players) - set(roles)):
            raise PluginError(f"rollout.agent.options.players: the environment has no role {unknown[0]!r}", fix=f"use {', '.join(roles)}")
        chosen = {role: name for role, name in self.players.items() if name != CURRENT}
        free = [role for role in roles if role not in chosen]
        if not free:
            raise PluginError("rollout.agent.options.players: the trained policy plays no role", fix="remove one of the roles from players")
        draw = random.Random(f"{task.key}")  # the same for all attempts at a task, in every process
        if self.opponent is not None and draw.random() < self.share:
            own = draw.choice(free)
            chosen |= {role: self.opponent for role in free if role != own}
        untrained: dict[str, Opponent | str] = {}
        opponent = None
        for role, name in chosen.items():
            if name == LEAGUE and opponent is None:
                if self.league is None:
                    raise TaskError("the game requires a past version of the policy as an opponent, but this command has no league")
                opponent = await stack.enter_async_context(self.league.opponent())
            untrained[role] = opponent if name == LEAGUE and opponent is not None else name
        return untrained


class Match:
    """One game in progress."""

    def __init__(
        self, players: Players, episode: LiveEpisode, environment: RoleEnvironment, untrained: Mapping[str, Opponent | str]
    ) -> None:
        self._agent, self._episode, self._environment, self._untrained = players, episode, environment, untrained
        self._players: dict[str, TrainedPlayer | FunctionPlayer | VersionPlayer] = {}
        self._totals = dict.fromkeys(environment.roles, 0.0)
        self._spare = [episode.trajectories[0]]  # the first trajectory, until a role takes it

    @property
    def version(self) -> int:
        """The newest version of the trained policy that sampled in this game; -1 if the trained policy made no move."""
        spans = [s.version for t in self._episode.trajectories for turn in t.turns for s in turn.versions]
        return max(spans, default=-1)

    def gains(self) -> list[tuple[Opponent, float]]:
        """Returns a pair (past version, gain) for each role that a past version plays. The gain is the mean reward of the policy's roles
        minus the reward of that role."""
        own = [total for role, total in self._totals.items() if role not in self._untrained]
        mean = sum(own) / len(own)
        return [(player, mean - self._totals[role]) for role, player in self._untrained.items() if not isinstance(player, str)]

    async def play(self) -> str:
        """Plays until the game ends or a role has no legal move. Returns `terminated`, `truncated`, the limit that prevented a move, or
        `forfeited`."""
        episode = self._episode
        episode.stage = "environment"
        observations, loop = await self._referred(await self._environment.reset()), asyncio.get_running_loop()
        while True:
            moves = await asyncio.gather(*(self._move(role, item) for role, item in observations.items()), return_exceptions=True)
            for outcome in moves:
                if isinstance(outcome, BaseException) and not isinstance(outcome, NoMove):
                    raise outcome
            actions = {role: move for role, move in zip(observations, moves, strict=True) if isinstance(move, str)}
            stuck = {role: move for role, move in zip(observations, moves, strict=True) if isinstance(move, NoMove)}
            if stuck:
                return self._forfeit(stuck)
            episode.stage, started = "environment", loop.time()
            try:
                step = await self._environment.step(actions)
            except PolicyFault:
                return self._forfeit({role: NoMove() for role in actions})
            for role in actions:
                self._record(role, wall_s=loop.time() - started)
            self._reward(step.rewards)
            observations = await self._referred(step.observations)
            for role, item in observations.items():
                if role in self._players:
                    self._record(role, text=item.text)
            if step.done:
                return "terminated" if step.terminated else "truncated"

    async def _referred(self, observations: Mapping[str, Observation]) -> dict[str, Observation]:
        return {role: await refer_observation(self._agent.chat, self._episode, item) for role, item in observations.items()}

    async def _move(self, role: str, observation: Observation) -> str:
        """Returns the action of a role. Raises `NoMove` if the role makes no allowed move. Records a failure if the policy's text cannot be
        read."""
        if role not in self._players:
            self._players[role] = self._player(role)
        actions = observation.actions or tuple(str(action) for action in self._environment.actions or ())
        clipped = replace(observation, text=clip(observation.text, self._episode.task.limits.tool_output_chars), actions=actions)
        try:
            action = await self._players[role].move(clipped)
        except PolicyFault as error:
            episode, kind = self._episode, "not_taken"
            failure = Failure(stage="chat", blame=Blame.POLICY, kind=kind, message=str(error)[:2000], turn=episode.turn_count)
            episode.add_failure(failure)
            raise NoMove from error
        if actions and action not in actions:
            raise NoMove
        return action

    def _player(self, role: str) -> TrainedPlayer | FunctionPlayer | VersionPlayer:
        player, players = self._untrained.get(role), self._agent
        instructions = self._environment.instructions if players.instructions is None else players.instructions

        def prompt(text: str) -> tuple[Message, ...]:
            return environment_prompt(self._episode.task.prompt, instructions, players.chat.escape_text(text))

        if player is None:
            if self._spare:
                trajectory = self._spare.pop()
                trajectory.describe(role)
            else:
                trajectory = self._episode.open(role)
            return TrainedPlayer(players.chat, self._episode, trajectory, prompt)
        name = player if isinstance(player, str) else f"version {player.number}"
        trajectory = self._episode.open(role, policy=name)
        if isinstance(player, str):
            return FunctionPlayer(self._episode, role, resolve(player), trajectory)
        return VersionPlayer(players, self._episode, trajectory, prompt, player)

    def _reward(self, rewards: Mapping[str, float]) -> None:
        """Adds rewards to the last action of each role. If a role has not acted yet, there is no turn in which to record its rewards."""
        for role, reward in rewards.items():
            self._totals[role] += reward
            if role in self._players:
                self._record(role, reward=reward)

    def _record(self, role: str, *, text: str = "", reward: float = 0.0, wall_s: float = 0.0) -> None:
        """Records what followed the last action of a role: rewards, and the observation that it sees next."""
        trajectory = self._players[role].trajectory
        if not trajectory.turns:
            return
        known = trajectory.turns[-1].tool_results or (ToolResult(name=USER, output="", ok=True, reward=0.0),)
        total = (known[0].reward or 0.0) + reward
        trajectory.add_results([replace(known[0], output=known[0].output or text, reward=total)], wall_s=wall_s)

    def _forfeit(self, stuck: Mapping[str, NoMove]) -> str:
        """Ends the game for roles without a legal move: each such role receives the reward `forfeit`, and the other roles share the negated
        sum."""
        others, forfeit = [role for role in self._environment.roles if role not in stuck], self._environment.forfeit
        self._reward({role: forfeit for role in stuck} | {role: -forfeit * len(stuck) / len(others) for role in others})
        return next((move.limit for move in stuck.values() if move.limit), "forfeited")


class UntrainedPlayer:
    """A player that is not trained. The turns of such a player have no tokens."""

    def __init__(self, trajectory: LiveTrajectory) -> None:
        self.trajectory = trajectory

    def record(self, action: str) -> None:
        """Records an action."""
        self.trajectory.add_turn(NO_TOKENS, Message(role="assistant", content=action))


NO_TOKENS = Completion(token_ids=(), logprobs=(), versions=(), finish_reason="stop")


class FunctionPlayer(UntrainedPlayer):
    """A player whose moves come from a user-supplied function. A failure of the function is an environment fault and is never scored."""

    def __init__(self, episode: LiveEpisode, role: str, function: PlayerFunction, trajectory: LiveTrajectory) -> None:
        super().__init__(trajectory)
        self._episode, self._role, self._function, self._seen = episode, role, function, list[str]()

    async def move(self, observation: Observation) -> str:
        """Returns the function's action. Raises `EnvironmentFault` if the function fails, does not return within `FUNCTION_S` or returns an
        action that is not allowed."""
        self._episode.stage = "opponent"
        self._seen.append(observation.text)
        try:
            action = await user_code.call_user_code(
                lambda: _awaited(self._function(self._role, tuple(self._seen), observation.actions)),
                what=f"the player function of {self._role}",
                timeout_s=FUNCTION_S,
            )
        except EnvironmentFault:
            raise
        except Exception as error:
            raise EnvironmentFault(f"the player function of {self._role} failed: {user_code.describe_error(error, 1000)}") from error
        if not isinstance(action, str) or (observation.actions and action not in observation.actions):
            raise EnvironmentFault(f"the player function of {self._role} returned {action!r:.80}, which is not an allowed action")
        self.record(action)
        return action


async def _awaited(result: Any) -> Any:
    return await cast(Awaitable[Any], result) if hasattr(result, "__await__") else result


class VersionPlayer(UntrainedPlayer):
    """A past version of the policy, on a server whose weights do not change during the game."""

    def __init__(self, players: Players, episode: LiveEpisode, trajectory: LiveTrajectory, prompt: Prompt, opponent: Opponent) -> None:
        super().__init__(trajectory)
        self._agent, self._episode, self._prompt, self._opponent = players, episode, prompt, opponent
        self._messages: list[Message] = []

    async def move(self, observation: Observation) -> str:
        """Returns a sampled action. Raises `NoMove` if the context has no room for an answer or if the answer is cut off, and `TaskError`
        if the context has no room for the first move of the game."""
        chat, limits, sampling = self._agent.chat, self._episode.task.limits, self._agent.sampling
        message = Message(role="user", content=chat.escape_text(observation.text))
        self._messages += [message] if self._messages else self._prompt(observation.text)
        ids = chat.opening(self._messages, ())
        if (room := self._episode.room) <= len(ids):
            if self._episode.turn_count == 0:  # as for the trained policy: the task is too long, and no player is to blame
                task, role = self._episode.task.id, self.trajectory.agent
                raise TaskError(
                    f"task {task!r}: the prompt of {role!r} has {len(ids)} tokens, but the limit for prompt and answer is {room}",
                    fix="shorten the prompt, or raise the lower of policy.max_model_len and limits.episode_tokens",
                )
            raise NoMove
        constraint = choice_constraint(observation.actions, chat)
        sampling = sampling.constrained() if constraint else sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=min(limits.turn_tokens, room - len(ids)),
            stop_token_ids=chat.stop_token_ids,
            constraint=constraint,
        )
        self._episode.stage = "opponent"
        name = f"{self._episode.id}-{len(self._messages)}.{self.trajectory.agent}"
        completion = await self._opponent.policy.generate(ids, params, request_id=name, timeout_s=OPPONENT_S)
        parsed = chat.parse(completion.token_ids, calls=False)
        self._messages.append(chat.escape_message(parsed.message))
        self.record(parsed.answer)
        if completion.finish_reason != "stop":
            raise NoMove
        return parsed.answer
