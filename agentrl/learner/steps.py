"""One learner process at work on a run folder.

The loop of a step: take its groups from the store, build the batch, update, checkpoint, commit the consumption, publish the new
version. The checkpoint's rename is the moment the step happened; what comes after it is repaired from the checkpoint when the
process dies in between.
"""

from __future__ import annotations

import logging
import random
import signal
import time
from collections import Counter
from pathlib import Path
from statistics import fmean

import torch
import transformers

from agentrl import recipe as recipes
from agentrl.errors import StoreError
from agentrl.experience import SqliteStore
from agentrl.learner import checkpoint as checkpoints
from agentrl.learner import ranks as processes
from agentrl.learner.broadcast import Broadcaster
from agentrl.learner.checkpoint import CheckpointMeta
from agentrl.learner.critic import Critic
from agentrl.learner.engine import PolicyEngine
from agentrl.learner.publish import probe_rows, publish, version_folder
from agentrl.learner.ranks import Ranks
from agentrl.learner.ulysses import in_teams
from agentrl.learner.update import Updater
from agentrl.objective import assemble, counted_samples
from agentrl.recipe import Recipe
from agentrl.records import Group
from agentrl.version import FolderRegistry

log = logging.getLogger("agentrl.learner")
_POLL_S = 0.05
_WAIT, _GO, _STOP = 0, 1, 2


class Worker:
    """One rank of the learner of a run. Opens nothing that another rank writes to, except the store (rank 0 commits)."""

    def __init__(self, run_dir: Path, recipe: Recipe, ranks: Ranks) -> None:
        self.run_dir = run_dir
        self.recipe = recipe
        self.ranks = ranks
        self.stopping = False
        self.store = SqliteStore(run_dir / "experience.sqlite")
        self.registry = FolderRegistry(run_dir / "versions")
        self.engine = PolicyEngine(version_folder(run_dir, 0), recipe, ranks)
        separate = recipe.critic is not None and not recipe.critic.shared
        self.critic = Critic(version_folder(run_dir, 0), recipe, ranks) if separate else None
        self.updater = Updater(self.engine, critic=self.critic)
        self.broadcaster = Broadcaster(run_dir, recipe, self.engine) if recipe.serving.weight_transfer == "nccl" else None
        self.consumed: dict[int, tuple[int, ...]] = {}
        self.next_step = 0

    def run(self) -> None:
        """Repairs what a crash left, then makes steps until `recipe.steps` are made or a stop is asked for."""
        self._resume()
        while self.next_step < self.recipe.steps:
            groups = self._wait_for_groups(self.next_step)
            if groups is None:
                log.info("stopped before step %d", self.next_step)
                return
            self._step(groups)
        log.info("all %d steps are made", self.recipe.steps)

    def close(self) -> None:
        self.store.close()
        self.registry.close()

    def _step(self, groups: tuple[Group, ...]) -> None:
        start = time.perf_counter()
        step = self.next_step
        weighed = counted_samples(groups, longest=self.recipe.policy.max_model_len) if self.recipe.objective.kl == "k1_reward" else ()
        penalties = self.updater.penalties(weighed)
        made = assemble(step, groups, self.recipe, penalties=penalties)
        metrics = self.updater.update(made.batch)
        if penalties:
            metrics["kl_penalty_mean"] = fmean(penalties.values())
        metrics |= {f"groups_{reason}": float(n) for reason, n in _reasons(made.dropped.values()).items()}
        metrics["weights_changed"] = float(metrics["optimizer_steps"] > 0)
        self.consumed[step] = made.batch.group_indices
        meta = CheckpointMeta(
            step=step + 1,
            consumed=dict(self.consumed),
            ranks=self.ranks.size,
            zero_stage=self.recipe.learner.zero_stage,
            bad_in_a_row=self.updater.bad_in_a_row,
            metrics=metrics,
            probe_rows=probe_rows(
                groups,
                vocabulary=self.engine.lm.config.get_text_config().vocab_size,
                max_model_len=self.recipe.policy.max_model_len,
            ),
        )
        saving = time.perf_counter()
        name = checkpoints.save(
            self.run_dir / "checkpoints", self.engine, meta, keep=self.recipe.learner.keep_checkpoints, critic=self.critic
        ).name
        publishing = time.perf_counter()
        if self.ranks.first:
            self.store.commit(step, made.batch.group_indices, name)
        self._publish(meta)
        self.next_step = step + 1
        end = time.perf_counter()
        for index, reason in made.dropped.items():
            log.info("step %d: group %d gives no sample: %s", step, index, reason)
        log.info(
            "step %d: %d samples, %d tokens trained; update %.2f s, checkpoint %.2f s, publish %.2f s, all %.2f s",
            *(step, len(made.batch.samples), made.batch.denominator),
            *(metrics["update_s"], publishing - saving, end - publishing, end - start),
        )

    def _publish(self, meta: CheckpointMeta) -> None:
        publish(
            self.run_dir,
            self.registry,
            self.engine,
            number=meta.step,
            metrics=meta.metrics,
            rows=meta.probe_rows,
            keep=self.recipe.learner.keep_versions,
        )
        if self.broadcaster is not None:
            self.broadcaster.send(meta.step)

    def _resume(self) -> None:
        """Loads the newest intact checkpoint and makes the store and the registry agree with it."""
        found = checkpoints.newest(self.run_dir / "checkpoints")
        if found is not None:
            checkpoints.restore(found, self.engine, critic=self.critic)
            self.next_step = found.meta.step
            self.consumed = dict(found.meta.consumed)
            self.updater.bad_in_a_row = found.meta.bad_in_a_row
            log.info("resumed after %d steps from %s", self.next_step, found.folder)
        missing = False
        if self.ranks.first:
            base = self.registry.get(0)
            if self.recipe.learner.lora is not None and base is not None:
                self.registry.verify(base)  # a checkpoint of an adapter is nothing without the weights it belongs to
            self.store.reconcile(self.consumed)
            self.registry.reconcile(self.next_step)
            missing = found is not None and not self._published(self.next_step)
        if self.ranks.decide(int(missing)) and found is not None:
            log.info("publishing version %d again", self.next_step)
            self._publish(found.meta)
        elif self.broadcaster is not None and found is not None:
            self.broadcaster.catch_up(self.next_step)

    def _published(self, number: int) -> bool:
        version = self.registry.get(number)
        if version is None:
            return False
        try:
            self.registry.verify(version)
        except StoreError as error:
            log.warning("version %d has to be published again: %s", number, error)
            return False
        return True

    def _wait_for_groups(self, step: int) -> tuple[Group, ...] | None:
        """The step's groups once all are stored, or None when asked to stop. Rank 0 decides for all ranks."""
        size = self.recipe.rollout.groups_per_step
        indices = range(step * size, (step + 1) * size)
        while True:
            decision = self.ranks.decide(self._look(step, indices) if self.ranks.first else _WAIT)
            if decision == _STOP:
                return None
            if decision == _GO:
                return self.store.take(step, indices, timeout_s=60.0)

    def _look(self, step: int, indices: range) -> int:
        if self.stopping:
            return _STOP
        if all(self.store.has(index) for index in indices):
            return _GO
        time.sleep(_POLL_S)
        return _WAIT


def _reasons(dropped: object) -> Counter[str]:
    """Counts of the reasons' names: the word before details."""
    return Counter(str(reason).partition(":")[0].partition(" ")[0] for reason in dropped)  # type: ignore[attr-defined]


def work(run_dir: Path) -> None:
    """Runs this rank of the learner of `run_dir`, under torchrun, until its steps are made or SIGTERM arrives.

    Raises `RecipeError` for a recipe that does not validate, `LearnerError` or `StoreError` when the learner cannot go on.
    """
    began = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    recipe = recipes.load(run_dir / "recipe.json")
    if recipe.learner.threads:
        torch.set_num_threads(recipe.learner.threads)
    ranks = in_teams(processes.join(recipe.device), recipe.learner.sequence_parallel)
    random.seed(recipe.seed + ranks.rank)
    torch.manual_seed(recipe.seed + ranks.rank)
    worker = Worker(run_dir, recipe, ranks)
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stopping", True))
    log.info("rank %d of %d is ready on %s after %.1f s", ranks.rank, ranks.size, ranks.device, time.perf_counter() - began)
    try:
        worker.run()
    finally:
        worker.close()
    processes.leave()
