"""One rank of a run's learner process.

A step selects its groups in the store, builds the batch, updates the weights, writes a checkpoint, commits the use of the groups and
publishes the new version. Renaming the checkpoint folder completes the step. If the process dies after that, the remaining work is repeated
from the checkpoint. If the driver's gate or a user rejected a version, the next step is a rollback instead of an update.
"""

from __future__ import annotations

import logging
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import transformers

from agentrl.config import recipe as recipes
from agentrl.config.gate import GATE
from agentrl.config.recipe import Recipe
from agentrl.errors import LearnerError, LearnerHalted, StoreError
from agentrl.experience import GroupOrder, open_store, step_uses
from agentrl.learner import checkpoint as checkpoints
from agentrl.learner import ranks as processes
from agentrl.learner.access import FolderAccess
from agentrl.learner.broadcast import Broadcaster
from agentrl.learner.checkpoint import CheckpointMeta
from agentrl.learner.critic import Critic
from agentrl.learner.driver_reports import SILENT, ProgressReporter
from agentrl.learner.engine import PolicyEngine
from agentrl.learner.publish import publish_version, select_probe_rows, version_folder, write_base_probe
from agentrl.learner.ranks import Ranks
from agentrl.learner.remote_access import LearnerAccess, RemoteAccess
from agentrl.learner.token_recorder import TokenRecorder
from agentrl.learner.ulysses import form_teams
from agentrl.learner.update import Updater
from agentrl.learner.update_guard import ROLLBACK, UpdateFailure
from agentrl.objective import AssembledBatch, assemble, counted_samples
from agentrl.objective.branches import captured_tokens
from agentrl.plugins import references
from agentrl.records import Batch, Group, GroupUse, VersionState
from agentrl.version import FolderRegistry

log = logging.getLogger("agentrl.learner")
_WAIT, _GO, _STOP = 0, 1, 2


class Worker:
    """One rank of a run's learner. No two ranks write to the same file; only rank 0 commits to the store."""

    def __init__(self, access: LearnerAccess, recipe: Recipe, ranks: Ranks) -> None:
        run_dir = access.folder
        self.access, self.checkpoints = access, run_dir / "checkpoints"
        self.recipe = recipe
        self.ranks = ranks
        self.stopping = False
        self.store, self.registry = access.store, access.registry
        self.engine = PolicyEngine(version_folder(run_dir, 0), recipe, ranks)
        separate = recipe.critic is not None and not recipe.critic.shared
        self.critic = Critic(version_folder(run_dir, 0), recipe, ranks) if separate else None
        self.updater = Updater(self.engine, critic=self.critic)
        if ranks.team is None or ranks.team.rank == 0:
            self.updater.recorder = TokenRecorder(run_dir, ranks.data_parallel_rank)
        nccl = recipe.serving.weight_transfer.ref == "nccl"
        self.broadcaster = Broadcaster(access.find_server, recipe, self.engine) if nccl else None
        self.order = GroupOrder.from_recipe(recipe)
        self.consumed_sha256 = step_uses.NO_STEPS
        self._open_block = 0  # first block that has not been consumed completely
        self.rolled_back: tuple[int, ...] = ()
        self.next_step = 0
        self.good = 0

    def run(self) -> None:
        """Repairs the state after a crash, then runs steps until `recipe.step_limit` is reached or a stop is requested."""
        self.ranks.report_progress("computing version 0's probe")
        write_base_probe(self.access, self.engine)
        self.ranks.report_progress("resuming")
        self._resume()
        while self.next_step < self.recipe.step_limit:
            self.ranks.report_progress("waiting for groups")
            groups = self._wait_for_groups(self.next_step)
            if groups is None:
                log.info("stopped before step %d", self.next_step)
                return
            self.ranks.report_progress("assembling a batch", _tokens(groups))
            self._step(groups, self._rejected(self.next_step))
        log.info("all %d steps are done", self.next_step)

    def close(self) -> None:
        """Closes the store and the registry."""
        self.access.close()

    def _step(self, groups: tuple[Group, ...], rejected: bool = False) -> None:
        start = time.perf_counter()
        step = self.next_step
        parent, metrics, uses = self._requested_rollback(step, groups) if rejected else self._train(step, groups)
        self.consumed_sha256 = step_uses.extend_hash(self.consumed_sha256, uses)
        vocabulary = self.engine.lm.config.get_text_config().vocab_size
        longest, image = self.recipe.policy.max_model_len, self.engine.image_token
        rows = select_probe_rows(groups, vocabulary=vocabulary, max_model_len=longest, image_token=image)
        meta = self._meta(step + 1, parent=parent, metrics=metrics, rows=rows)
        saving = time.perf_counter()
        self.ranks.report_progress("writing a checkpoint")
        if self.ranks.is_first:
            self.access.record_uses(uses)
        name = self._save(meta)
        publishing = time.perf_counter()
        self.ranks.report_progress("publishing a version")
        if self.ranks.is_first:
            self.store.commit(step, uses, name)
        self._publish(meta)
        if self.updater.recorder is not None:
            self.access.tokens_recorded(step + 1, self.ranks.data_parallel_rank)
        self.next_step = step + 1
        end = time.perf_counter()
        log.info(
            "step %d: %d tokens trained; before the checkpoint %.2f s, checkpoint %.2f s, publish %.2f s, total %.2f s",
            *(step, metrics.get("tokens_trained", 0), saving - start, publishing - saving, end - publishing, end - start),
        )

    def _train(self, step: int, groups: tuple[Group, ...]) -> tuple[int, dict[str, float], dict[int, GroupUse]]:
        """Updates the weights, or rolls back if a limit of the recipe requires a rollback.

        Returns the parent of the new version, the metrics, and a mapping from group index to how the group was used.
        """
        replayed = self._groups_to_replay(step)
        assembled, metrics, failures = self._update(step, groups, replayed)
        for index, reason in assembled.drop_reasons.items():
            log.info("step %d: group %d has no samples: %s", step, index, reason)
        if self.updater.guard.start_weights_passed:
            self.good = step
        if self.updater.guard.rolling_back:
            parent = self._roll_back(step, self.good)
            return parent, metrics | {"rollbacks": 1.0, "weights_changed": float(parent < step)}, _unused(groups, "rolled_back")
        if self.good == step and not metrics["weights_changed"]:
            self.good = step + 1  # the same weights with the next number, for instance while a critic warms up
        return step, metrics, group_uses(groups, assembled, failures, updated=metrics["optimizer_steps"] > 0)

    def _requested_rollback(self, step: int, groups: tuple[Group, ...]) -> tuple[int, dict[str, float], dict[int, GroupUse]]:
        """Performs the requested rollback. The groups of this step were sampled by undone versions, so the step consumes them untrained."""
        request = self.access.pending_rollback()
        if request is None:
            raise LearnerError(f"step {step}: the rollback request disappeared")
        reason = f"{'a user' if request.by_user else 'the gate'} rejected version {request.version}: {request.reason}"
        parent = self._roll_back(step, request.to)
        if self.ranks.is_first:
            setback = UpdateFailure(
                step=step,
                action=ROLLBACK,
                what="user" if request.by_user else "gate",
                reasons=(reason,),
                groups=tuple(group.index for group in groups),
                episodes=tuple(scored.episode.id for group in groups for scored in group.episodes),
                metrics={},
            )
            self.access.record_setbacks((setback,))
        return parent, {"rollbacks": 1.0, "weights_changed": 1.0}, _unused(groups, "rolled_back")

    def _groups_to_replay(self, step: int) -> tuple[Group, ...]:
        indices = self.order.replayed(self.store.entries(step=step - 1)) if self.order.replay and step else ()
        return self.store.groups(indices) if indices else ()

    def _update(
        self, step: int, groups: tuple[Group, ...], replayed: tuple[Group, ...]
    ) -> tuple[AssembledBatch, dict[str, float], tuple[UpdateFailure, ...]]:
        """Runs the update of a step, and records setbacks, even if the run halts because of them."""
        guard = self.updater.guard
        trained = (*groups, *replayed)
        penalized = counted_samples(trained, longest=self.recipe.policy.max_model_len) if self.recipe.objective.kl == "k1_reward" else ()
        penalties = self.updater.score_penalties(penalized)
        assembled = assemble(step, trained, self.recipe, penalties=penalties)
        try:
            excluded = guard.exclude_groups(step, trained, assembled.drop_reasons)
            metrics = self.updater.update(assembled.batch)
            if self.updater.recorder is not None:
                self.updater.recorder.save(step + 1)
        finally:
            setbacks = guard.take_failures()
            for setback in setbacks:
                log.warning("step %d: %s of groups %s: %s", step, setback.action, setback.groups, "; ".join(setback.reasons))
            if self.ranks.is_first:
                self.access.record_setbacks(setbacks)
        if penalties and math.isfinite(mean := fmean(penalties.values())):
            metrics["kl_penalty_mean"] = mean
        reasons = Counter(reason.partition(":")[0].partition(" ")[0] for reason in assembled.drop_reasons.values())  # without details
        metrics |= {f"groups_{reason}": float(count) for reason, count in reasons.items()}
        metrics |= {"groups_left_out": float(excluded), "rollbacks": 0.0}
        metrics["weights_changed"] = float(metrics["optimizer_steps"] > 0)
        metrics["tokens_captured"] = float(captured_tokens(trained, assembled.drop_reasons))
        counts = _new_and_replayed(assembled.batch, frozenset(group.index for group in replayed))
        metrics |= counts if self.order.replay else {name: counts[name] for name in ("groups", "groups_trained", "tokens_trained")}
        return assembled, metrics, setbacks

    def _roll_back(self, step: int, to: int) -> int:
        """Undoes all steps after checkpoint `to` and returns `to`. Raises `LearnerHalted` if that checkpoint is missing or damaged.

        The groups of the undone steps stay consumed. The old weights are published under the next number, so the server and the
        rollouts switch to them as to any other version.
        """
        self.access.need_checkpoint(to, self.ranks)
        checkpoint = checkpoints.numbered(self.checkpoints, to)
        if checkpoint is None:
            raise LearnerHalted(
                f"step {step}: a rollback is required, but checkpoint {to} is missing or damaged\n"
                f"  fix: request a different version, or cancel the rollback: agentrl versions rollback {self.access.folder} --help"
            )
        checkpoints.restore(checkpoint, self.engine, critic=self.critic)
        guard = self.updater.guard
        guard.counts = replace(guard.counts, undone=step + 1 - (checkpoint.meta.step - checkpoint.meta.counts.undone))
        self.rolled_back += tuple(number for number in range(to + 1, step + 1) if number not in self.rolled_back)
        log.warning("step %d: rolled back to the weights of version %d", step, to)
        self.good = step + 1
        return to

    def _meta(self, step: int, *, parent: int, metrics: dict[str, float], rows: tuple[tuple[int, ...], ...]) -> CheckpointMeta:
        return CheckpointMeta(
            step=step,
            consumed_sha256=self.consumed_sha256,
            ranks=self.ranks.size,
            zero_stage=self.recipe.learner.zero_stage,
            counts=self.updater.guard.counts,
            good=self.good,
            parent=parent,
            rolled_back=self.rolled_back,
            metrics=metrics,
            probe_rows=rows,
        )

    def _save(self, meta: CheckpointMeta) -> str:
        keep, spare = self.recipe.learner.keep_checkpoints, self._spared_checkpoints
        spread = self.access.own_disk and self.ranks.hosts > 1
        written = partial(self.access.checkpoint_written, spare=spare, ranks=self.ranks)
        folder = checkpoints.save(
            *(self.checkpoints, self.engine, meta), keep=keep, critic=self.critic, spare=spare, written=written, spread=spread
        )
        if self.ranks.is_first:
            self.access.prune_checkpoints(keep, spare)
        return folder.name

    def _spared_checkpoints(self) -> set[int]:
        """Returns the numbers of the checkpoints that a rollback may need."""
        spared = {self.good} if self.recipe.learner.rolls_back else set()
        if (request := self.access.pending_rollback()) is not None:
            spared.add(request.to)
        return spared | self._gate_checkpoints() | self.registry.pinned()

    def _publish(self, meta: CheckpointMeta) -> None:
        publish_version(
            self.access,
            self.engine,
            number=meta.step,
            parent=meta.parent,
            metrics=meta.metrics,
            rows=meta.probe_rows,
            keep=self.recipe.learner.keep_versions,
            as_delta=self.recipe.serving.weight_transfer.ref == "delta",
        )
        self._mark_rolled_back()
        if self.broadcaster is not None:
            self.broadcaster.send(meta.step)

    def _resume(self) -> None:
        """Loads the newest intact checkpoint and brings the store and the registry to the same step."""
        self.access.prepare(self.ranks.report_progress.alert, self.ranks)
        checkpoint = checkpoints.newest(self.checkpoints, alert=self.ranks.report_progress.alert)
        if checkpoint is not None:
            checkpoints.restore(checkpoint, self.engine, critic=self.critic)
            self.next_step = checkpoint.meta.step
            self.consumed_sha256 = checkpoint.meta.consumed_sha256
            self.updater.guard.counts = checkpoint.meta.counts
            self.good, self.rolled_back = checkpoint.meta.good, checkpoint.meta.rolled_back
            log.info("resumed after step %d from %s", self.next_step, checkpoint.folder)
        elif self.recipe.learner.rolls_back or (self.recipe.gate is not None and self.recipe.gate.rolls_back):
            self._save(self._meta(0, parent=0, metrics={}, rows=()))  # the first update can be undone too
        missing = False
        if self.ranks.is_first:
            base = self.registry.get(0)
            if self.recipe.learner.lora is not None and base is not None:
                self.registry.verify(base)  # an adapter needs its base weights
            self.access.reconcile(self.next_step, self.consumed_sha256)
            self.registry.reconcile(self.next_step)
            self.access.forget_setbacks(self.next_step)
            missing = checkpoint is not None and not self._published(self.next_step)
        if self.ranks.from_first(int(missing)) and checkpoint is not None:
            log.info("publishing version %d again", self.next_step)
            self._publish(checkpoint.meta)
        elif self.broadcaster is not None and checkpoint is not None:
            self.broadcaster.catch_up(self.next_step)
        self._mark_rolled_back()

    def _mark_rolled_back(self) -> None:
        """Marks the undone versions. Called when their successor is published, because until then the servers need a version, even a bad
        one."""
        if self.ranks.is_first:
            for number in self.rolled_back:
                version = self.registry.get(number)
                if version is not None and version.state is not VersionState.ROLLED_BACK:
                    self.registry.set_state(number, VersionState.ROLLED_BACK)

    def _rejected(self, step: int) -> bool:
        """Whether this step must perform a rollback that the gate or a user requested. Rank 0 decides for all ranks."""
        return bool(self.ranks.from_first(int(self.ranks.is_first and self._rollback_requested(step))))

    def _rollback_requested(self, step: int) -> bool:
        request = self.access.pending_rollback()
        if request is None or request.version > step or request.version in self.rolled_back:
            return False
        to = self.registry.get(request.to)
        if to is None or to.sha256 != request.to_sha256:
            raise LearnerHalted(f"step {step}: a rollback to version {request.to} was requested, but its weights changed after the request")
        return True

    def _gate_checkpoints(self) -> set[int]:
        """Returns the numbers of the checkpoints that the gate may request.

        These checkpoints belong to the last promoted version, and to later versions on which the gate has yet to decide."""
        gate = self.recipe.gate
        if gate is None or not gate.rolls_back:
            return set()
        promoted = self.registry.latest(VersionState.PROMOTED)
        first = promoted.number if promoted is not None else 0
        due = (number for number in range(first + 1, self.next_step + 1) if number % gate.every == 0 and number not in self.rolled_back)
        return {first, *(number for number in due if (version := self.registry.get(number)) is None or GATE not in version.evals)}

    def _published(self, number: int) -> bool:
        version = self.registry.get(number)
        if version is None:
            return False
        try:
            self.registry.verify(version)
        except StoreError as error:
            log.warning("version %d must be published again: %s", number, error)
            return False
        return True

    def _wait_for_groups(self, step: int) -> tuple[Group, ...] | None:
        """Waits for the step's groups and returns them, or returns None if a stop was requested. Rank 0 decides for all ranks."""
        while True:
            decision = self.ranks.from_first(self._look(step) if self.ranks.is_first else _WAIT)
            self.ranks.report_progress("waiting for groups")
            if decision == _STOP:
                return None
            if decision == _GO:
                indices = tuple(entry.index for entry in self.store.entries(step=step))
                if not indices:
                    raise StoreError(f"step {step}: the assigned groups disappeared")
                return self.store.groups(indices)

    def _look(self, step: int) -> int:
        """Assigns groups to the step if the store contains enough of them. Returns `_GO`, `_WAIT` or `_STOP`."""
        if self.stopping:
            return _STOP
        entries = self.store.entries(first=self.order.block(self._open_block).start)
        self._open_block = self.order.first_open_block(entries, before=step, start=self._open_block)
        indices = self.order.select(step, entries)
        if indices is None:
            time.sleep(self.access.poll_s)
            return _WAIT
        self.store.assign(step, indices)
        return _GO


def group_uses(
    groups: Sequence[Group], assembled: AssembledBatch, failures: Sequence[UpdateFailure], *, updated: bool = True
) -> dict[int, GroupUse]:
    """Returns a mapping from group index to how an update used the group: the tokens that it trained, or the reason why it trained none.

    Args:
        updated: whether the step had optimizer steps of the policy; a critic may warm up first.
    """
    tokens = Counter[int]()
    for sample in assembled.batch.samples:
        tokens[sample.group_index] += sum(sample.loss_mask)
    skipped = {index for failure in failures if failure.what == "policy" for index in failure.groups}
    unused = "" if updated else "critic_warmup"
    reasons = {index: "update_skipped" if index in skipped else unused for index in tokens} | dict(assembled.drop_reasons)
    return {
        group.index: GroupUse(tokens_trained=0 if reasons.get(group.index) else tokens[group.index], reason=reasons.get(group.index, ""))
        for group in groups
    }


def _new_and_replayed(batch: Batch, replayed: frozenset[int]) -> dict[str, float]:
    """Returns the counts of a batch's groups and trained tokens, without residuals and replays, and the counts of replayed groups."""
    tokens, groups = Counter[int](), {sample.group_index for sample in batch.samples}
    for sample in batch.samples:
        tokens[sample.group_index] += sum(sample.loss_mask)
    new = {index for index in batch.group_indices if index >= 0} - replayed
    return {
        "groups": float(len(new)),
        "groups_trained": float(len(groups & new)),
        "groups_replayed": float(len(groups & replayed)),
        "tokens_trained": float(sum(tokens[index] for index in new)),
        "tokens_replayed": float(sum(tokens[index] for index in replayed)),
    }


def _unused(groups: Sequence[Group], reason: str) -> dict[int, GroupUse]:
    return {group.index: GroupUse(reason=reason) for group in groups}


def _tokens(groups: tuple[Group, ...]) -> int:
    """Returns the number of tokens in all turns of the groups."""
    trajectories = (trajectory for group in groups for scored in group.episodes for trajectory in scored.episode.trajectories)
    return sum(len(turn.prompt_ids) + len(turn.completion_ids) for trajectory in trajectories for turn in trajectory.turns)


def run_worker(run_dir: Path, *, root: Path | None = None, progress: str | None = None, driver: tuple[str, str] | None = None) -> None:
    """Runs this rank of the learner for the run in `run_dir` until all steps are done or SIGTERM arrives.

    Args:
        root: project root, for a user-supplied store, estimator and loss.
        progress: path of the pipe for `ProgressReporter`; None disables reports.
        driver: address and key of the driver, if `run_dir` is a mirror of the run folder.

    Raises `UserError` if the recipe, the model or a user-supplied part is invalid, and `InfrastructureError` (such as `LearnerError`,
    `StoreError` or `DiskFull`) if the learner cannot continue.
    """
    start = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    if root is not None:
        references.add_project_root(root)
    remote = None if driver is None else RemoteAccess.open(run_dir, *driver)
    recipe = recipes.load(run_dir / "recipe.json")
    if recipe.learner.threads:
        torch.set_num_threads(recipe.learner.threads)
    ranks = form_teams(processes.join(recipe.device), recipe.learner.sequence_parallel)
    ranks = replace(ranks, report_progress=ProgressReporter(progress) if ranks.is_first else SILENT)
    ranks.report_progress("loading the model")
    random.seed(recipe.seed + ranks.rank)
    torch.manual_seed(recipe.seed + ranks.rank)
    if remote is not None:
        remote.fetch_base(ranks)
    access = remote or FolderAccess(run_dir, open_store(run_dir, recipe), FolderRegistry(run_dir / "versions"))
    worker = Worker(access, recipe, ranks)
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stopping", True))
    log.info("rank %d of %d is ready on %s after %.1f s", ranks.rank, ranks.size, ranks.device, time.perf_counter() - start)
    try:
        worker.run()
    finally:
        worker.close()
    processes.leave()
