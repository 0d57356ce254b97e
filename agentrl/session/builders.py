"""Builds parts of a run: the runners of episodes and groups, which rollout workers also use, and the policy's servers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from agentrl.agent import ChatFormat
from agentrl.config.recipe import Recipe
from agentrl.failure import FaultRate
from agentrl.plugins import parts
from agentrl.protocols import (
    Agent,
    EpisodeCheckpoints,
    EpisodeListener,
    Launcher,
    League,
    Policy,
    PolicyServer,
    SandboxBackend,
    SilentListener,
    ToolSource,
    VersionRegistry,
)
from agentrl.protocols.reward import GroupJudge
from agentrl.reward import TaskScorer
from agentrl.reward.group_judging import GroupJudgeScorer
from agentrl.rollout import Admission, AttemptListener, EpisodeRunner, GroupRunner, MemorySource, Pace, RequestRouter
from agentrl.serving.server_pool import ServerPool
from agentrl.serving.supervisor import SupervisedServer

log = logging.getLogger(__name__)


def fault_rate(recipe: Recipe) -> FaultRate:
    """Returns the object that measures the fault rate of all attempts in flight.

    The rate includes the attempts of a gate with a separate server, because a dead daemon affects these attempts too.
    """
    return FaultRate(concurrency=recipe.max_concurrent_episodes)


def open_policy_server(
    recipe: Recipe,
    run_dir: Path,
    registry: VersionRegistry,
    *,
    launcher: Launcher | None = None,
    alert: Callable[[str], None] = log.warning,
) -> PolicyServer:
    """Opens the policy's server, or a pool of several servers. For `launcher` and `alert`, see `SupervisedServer`."""
    if recipe.serving.replicas == 1:
        return SupervisedServer(recipe, run_dir, registry, launcher=launcher, alert=alert)
    return ServerPool(recipe, run_dir, registry, launcher=launcher, alert=alert)


def build_agent(recipe: Recipe, chat: ChatFormat, league: League | None = None) -> Agent:
    """Builds the agent of a recipe."""
    settings = recipe.rollout.agent_settings | ({} if league is None else {"league": league})
    agent: Agent = parts.make_part(parts.AGENT, recipe.agent, chat=chat, **settings)
    return agent


def build_episode_runner(
    recipe: Recipe,
    policy: Policy,
    sandboxes: SandboxBackend,
    chat: ChatFormat,
    tools: ToolSource | None = None,
    league: League | None = None,
    *,
    router: RequestRouter | None = None,
    pace: Pace | None = None,
    listener: EpisodeListener | None = None,
) -> EpisodeRunner:
    """Builds the episode runner of a recipe."""
    return EpisodeRunner(
        policy=policy,
        sandboxes=sandboxes,
        agent=build_agent(recipe, chat, league),
        sampling=recipe.rollout.distribution,
        max_model_len=recipe.policy.max_model_len,
        request_timeout_s=recipe.serving.request_timeout_s,
        tools=tools,
        router=router,
        pace=pace or Pace(slots=recipe.serving.max_num_seqs * recipe.serving.replicas),
        listener=listener or SilentListener(),
    )


def build_group_runner(
    recipe: Recipe,
    episodes: EpisodeRunner,
    scorer: TaskScorer,
    checkpoints: EpisodeCheckpoints,
    on_attempt: AttemptListener,
    slots: Admission,
    *,
    group_judge: GroupJudge | None = None,
    memory: MemorySource | None = None,
) -> GroupRunner:
    """Builds the group runner of a recipe."""
    scoring, rollout = None, recipe.rollout
    if group_judge is not None:
        name, weight = str(recipe.tasks.group_judge), recipe.tasks.group_weight
        scoring = GroupJudgeScorer(judge=group_judge, name=name, weight=weight, task_scorer=scorer)
    return GroupRunner(
        runner=episodes,
        scorer=scorer,
        group_scoring=scoring,
        slots=slots,
        group_size=rollout.group.size,
        spare_attempts=rollout.group.spare_attempts,
        stop_equal_after=rollout.group.stop_equal_after,
        branches=rollout.group.branches,
        branch_turn=rollout.group.branch_turn,
        memory=memory,
        checkpoints=checkpoints if rollout.checkpoint_turns else None,
        on_attempt=on_attempt,
    )
