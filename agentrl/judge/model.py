"""Base classes of judges that query one model. A judge has an endpoint, a ledger, a budget and, optionally, a required calibration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from agentrl.judge.calibration import require_calibration, validate_requirements
from agentrl.judge.endpoint import Endpoint
from agentrl.judge.ledger import FILE, Budget, JudgeLedger, JudgeUsage
from agentrl.judge.non_answers import non_answer_reason
from agentrl.judge.query import MAX_KEPT, WORDING, JudgeAnswer, JudgeClient, digest
from agentrl.judge.rendering import reference_text, user_text
from agentrl.judge.servers import ServedUrl
from agentrl.records import Blame, Episode, Score, Task

_CLOSING_S = 60.0  # seconds that the deadline adds to the endpoint's patience


@dataclass(slots=True)
class _State:
    ledger: JudgeLedger | None = None
    ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JudgeBase(ABC):
    """Base class of verifiers, group judges and triage judges that query a model, with the endpoint, the budget and the ledger."""

    endpoint: Endpoint
    name: str = "judge"
    budget: Budget = field(default_factory=Budget)
    _state: _State = field(default_factory=_State, init=False, repr=False)

    @property
    @abstractmethod
    def identity(self) -> str:
        """Hash of everything that determines the verdicts: the model, parameters and prompt, but not the name, URL or budget."""

    @property
    def timeout_s(self) -> float:
        """Deadline of a verdict in seconds, including the wait for a server that is down."""
        return self.endpoint.patience_s + _CLOSING_S

    def spent(self) -> JudgeUsage:
        """Returns the usage that the ledger has counted for this judge."""
        return self._ledger().spent(self.identity)

    async def close(self) -> None:
        """Closes the judge's connections and its ledger."""
        await self.endpoint.close()
        if self._state.ledger is not None:
            self._state.ledger.close()

    def _client(self) -> JudgeClient:
        return JudgeClient(endpoint=self.endpoint, ledger=self._ledger(), budget=self.budget, judge=self.identity)

    def _ledger(self) -> JudgeLedger:
        if self._state.ledger is None:
            self._state.ledger = JudgeLedger(None)
        return self._state.ledger


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelJudge(JudgeBase):
    """Base class of judges that query one model about episodes."""

    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    asks_reward_model: ClassVar[bool] = False

    reference: str = "answer"  # key of `Task.data` that holds the reference answer
    ledger: str | None = None  # file of cache and counters, relative to the project; None means the run's judges.sqlite, or memory
    calibration: str | None = None  # required calibration file from `agentrl judge calibrate`, relative to the project
    min_agreement: float = 0.0  # minimum for the lower end of the calibration's agreement interval
    min_coverage: float = 0.0  # the same for coverage, the share of answers with a verdict

    def __post_init__(self) -> None:
        validate_requirements(self.calibration, min_agreement=self.min_agreement, min_coverage=self.min_coverage)

    @property
    def identity(self) -> str:
        """See `JudgeBase.identity`."""
        return digest({"kind": type(self).__name__, "wording": WORDING, "endpoint": self.endpoint.identity(), "asks": self._asks()})

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """Prepares the judge. Call this method once before the first verdict.

        Raises `UserError` if the required calibration is missing, is for other settings, or does not meet the minimums, or if the recipe
        does not start the judge server in `endpoint.url`.

        Args:
            root: the project folder.
            folder: the run folder; None if there is no run.
        """
        if isinstance(self.endpoint.url, ServedUrl):
            self.endpoint.url.server(reward_model=self.asks_reward_model)
        if self.calibration is not None:
            limits = {"min_agreement": self.min_agreement, "min_coverage": self.min_coverage}
            require_calibration(root / self.calibration, identity=self.identity, name=self.name, **limits)
        if self.ledger is not None:
            self._state.ledger = JudgeLedger((root / self.ledger).resolve())  # the user chose the path, so it may be a link
        elif folder is not None:
            self._state.ledger = JudgeLedger(folder / FILE)
        self._state.ready = True

    def without_calibration(self, *, ledger: str | None = None) -> Self:
        """Returns a copy with the same identity that requires no calibration, for measuring the judge."""
        return replace(self, calibration=None, min_agreement=0.0, min_coverage=0.0, ledger=ledger or self.ledger)

    @abstractmethod
    def _asks(self) -> dict[str, Any]:
        """Returns the settings that determine the judge's prompts."""

    def _client(self) -> JudgeClient:
        if not self._state.ready:
            self.prepare(root=Path(), folder=None)
        return JudgeBase._client(self)

    def _ledger(self) -> JudgeLedger:
        if self._state.ledger is None and self.ledger is not None:
            self._state.ledger = JudgeLedger(Path(self.ledger).resolve())
        return JudgeBase._ledger(self)

    def _non_answer(self, task: Task, episode: Episode) -> str:
        """Returns the reason why an answer is wrong, determined without querying the model; empty if the model must judge the answer."""
        return non_answer_reason(episode.answer, question=user_text(task), reference=reference_text(task, self.reference))

    def _unscored(self, answer: JudgeAnswer) -> Score:
        """Returns a score without a value. Its reason is the reason in `answer`, and its evidence is the model's reply."""
        blame = Blame.INFRASTRUCTURE if answer.unavailable else None
        return Score(value=None, reason=f"{self.name}: {answer.reason}", evidence=answer.text[:MAX_KEPT], blame=blame)
