"""Roles that the policy in training plays, each in a separate context: the roles in a game, and the user in a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.agent.chat import ChatFormat, ParsedCompletion
from agentrl.agent.contexts import continue_context, read_turn, reading_policy_text
from agentrl.environment.dialogue import AGENT, END, LEFT, USER, Said, user_messages
from agentrl.errors import PolicyFault
from agentrl.gateway.constraint import choice_constraint
from agentrl.protocols import LiveEpisode, LiveTrajectory
from agentrl.records import CUT, Message, Observation, ToolResult, Turn
from agentrl.records.chat import USER as USER_RESULT

UNTRAINED = "policy (not trained)"
"""The value of `Trajectory.policy` for a user that the policy plays without being trained on it."""
Prompt = Callable[[str], tuple[Message, ...]]
"""A function that returns the first messages of a role's context, given the role's first observation."""


class NoMove(Exception):
    """A role cannot make a legal move. `limit` is the limit that prevents a move; empty if there is none."""

    def __init__(self, limit: str = "") -> None:
        super().__init__(limit)
        self.limit = limit


class TrainedPlayer:
    """The policy in training. The exact tokens of this player's turns are recorded."""

    def __init__(self, chat: ChatFormat, episode: LiveEpisode, trajectory: LiveTrajectory, prompt: Prompt) -> None:
        self._chat, self._episode, self.trajectory, self._prompt = chat, episode, trajectory, prompt
        self._next = trajectory
        self._first: tuple[Message, ...] = ()
        self._said: ParsedCompletion | None = None

    def resume(self, observation: str) -> None:
        """Resumes the player after its recorded turns. `observation` is the first observation of the role."""
        turn = self.trajectory.turns[-1]
        self._first = self._prompt(observation)
        self._said = ParsedCompletion(message=turn.message, end=(*turn.prompt_ids, *turn.completion_ids)[-1])

    async def move(self, observation: Observation) -> str:
        """Returns a sampled action. Raises `NoMove` if a limit is reached or the answer is cut off, and `PolicyFault` if the policy's text
        cannot be read or rendered."""
        chat, episode = self._chat, self._episode
        episode.stage = "chat"
        if self._said is None:
            self._first = self._prompt(observation.text)
            self.trajectory.describe(self.trajectory.agent, self._first)
            self.trajectory.add_prompt(chat.opening(self._first, ()))
        else:
            with reading_policy_text("rendered again with an observation"):
                role = self.trajectory.agent
                self._next = continue_context(chat, episode, self.trajectory, self._said, prompt=self._first, schemas=(), agent=role)
        if limit := self._next.limit():
            raise NoMove(limit)
        constraint = choice_constraint(observation.actions, chat)
        completion = await self._next.sample(stop_token_ids=chat.stop_token_ids, thinking=chat.thinking, constraint=constraint)
        episode.stage = "chat"
        self.trajectory = self._next
        self._said = read_turn(chat, self.trajectory, completion)
        if completion.finish_reason != "stop":
            raise NoMove("wall_limit" if completion.finish_reason == CUT else "token_limit")
        return self._said.answer


class PolicyUser:
    """An `agentrl.environment.dialogue.User`: the policy plays the user, in trajectories of the agent `user`.

    `limit` is the task limit that stopped the user; empty if none did.
    """

    def __init__(self, chat: ChatFormat, episode: LiveEpisode, *, trained: bool) -> None:
        self.limit = ""
        self._chat, self._episode, self._policy = chat, episode, "" if trained else UNTRAINED
        self._player: TrainedPlayer | None = None

    async def __call__(self, brief: str, dialogue: Said) -> str:
        """Returns the user's next message, which is the recorded message while a resumed episode repeats its actions. If the policy writes
        no readable, complete message, the user leaves the conversation."""
        turns = self._turns()
        number = sum(speaker == AGENT for speaker, _ in dialogue) - 1
        if number < len(turns):
            return self._chat.answer_of(turns[number].message)
        if self._player is None:
            self._player = self._open(brief, dialogue)
        if turns:
            result = ToolResult(name=USER_RESULT, output=dialogue[-1][1], ok=True)
            self._player.trajectory.add_results([result], wall_s=0.0)
        try:
            text = await self._player.move(Observation(text=dialogue[-1][1]))
        except (NoMove, PolicyFault) as error:
            text, self.limit = "", error.limit if isinstance(error, NoMove) else ""
        self._episode.stage = "environment"
        return text if text.strip() else f"{LEFT} {END}"

    def _turns(self) -> Sequence[Turn]:
        return [turn for trajectory in self._episode.trajectories if trajectory.agent == USER for turn in trajectory.turns]

    def _open(self, brief: str, dialogue: Said) -> TrainedPlayer:
        """Returns the player of a new or resumed conversation. `dialogue` starts with the opening and a message from the agent."""
        own = [trajectory for trajectory in self._episode.trajectories if trajectory.agent == USER]
        trajectory = own[-1] if own else self._episode.open(USER, policy=self._policy)
        player = TrainedPlayer(self._chat, self._episode, trajectory, lambda text: user_prompt(self._chat, brief, dialogue[0][1], text))
        if own:
            player.resume(dialogue[1][1])
        return player


def user_prompt(chat: ChatFormat, brief: str, opening: str, text: str) -> tuple[Message, ...]:
    """Returns the first messages of a user: its brief, its opening and a message from the agent."""
    messages = user_messages(brief, ((USER, opening), (AGENT, text)))
    return tuple(Message(role=role, content=chat.escape_text(content)) for role, content in messages)
