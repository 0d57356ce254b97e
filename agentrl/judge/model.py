"""What all judges that ask a model have in common: an endpoint, a ledger, a budget, and the calibration that they may demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from agentrl.judge.calibration import require_calibration, validate_requirements
from agentrl.judge.endpoint import Endpoint
from agentrl.judge.ledger import FILE, Budget, JudgeLedger, JudgeUsage
from agentrl.judge.query import MAX_KEPT, WORDING, JudgeAnswer, JudgeClient, digest
from agentrl.judge.servers import ServedUrl
from agentrl.records import Blame, Score

_CLOSING_S = 60.0  # beyond the endpoint's patience, for everything around it


@dataclass(slots=True)
class _State:
    ledger: JudgeLedger | None = None
    ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelJudge(ABC):
    """Base of judges that ask one model. Not a judge itself."""

    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    asks_reward_model: ClassVar[bool] = False

    endpoint: Endpoint
    name: str = "judge"
    reference: str = "answer"  # the key of `Task.data` that holds a reference
    budget: Budget = field(default_factory=Budget)
    ledger: str | None = None  # file of cache and counts, relative to the project; None: judges.sqlite of the run folder
    calibration: str | None = None  # file of `agentrl judge calibrate`, relative to the project, without which the judge is refused
    min_agreement: float = 0.0  # that the calibration must show, with the lower end of its interval
    min_coverage: float = 0.0  # share of answers with a verdict that it must show, likewise
    _state: _State = field(default_factory=_State, init=False, repr=False)

    def __post_init__(self) -> None:
        validate_requirements(self.calibration, min_agreement=self.min_agreement, min_coverage=self.min_coverage)

    @property
    def identity(self) -> str:
        """A hash of all that decides about its verdicts: model, parameters, prompt. Its name, its url and its budget do not."""
        return digest({"kind": type(self).__name__, "wording": WORDING, "endpoint": self.endpoint.identity(), "asks": self._asks()})

    @property
    def timeout_s(self) -> float:
        """How long a verdict may take: a judge that is down delays its episodes."""
        return self.endpoint.patience_s + _CLOSING_S

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """Called once before the first verdict. Raises `UserError` where the demanded calibration is missing, stale or not good enough.

        Args:
            root: the project.
            folder: the run folder; None: there is no run.
        """
        if isinstance(self.endpoint.url, ServedUrl):
            self.endpoint.url.server(reward_model=self.asks_reward_model)
        if self.calibration is not None:
            demands = {"min_agreement": self.min_agreement, "min_coverage": self.min_coverage}
            require_calibration(root / self.calibration, identity=self.identity, name=self.name, **demands)
        if self.ledger is not None:
            self._state.ledger = JudgeLedger((root / self.ledger).resolve())  # the user chose the path, so it may be a link
        elif folder is not None:
            self._state.ledger = JudgeLedger(folder / FILE)
        self._state.ready = True

    def without_calibration(self, *, ledger: str | None = None) -> Self:
        """The same judge, same identity, that demands no calibration: for measuring it."""
        return replace(self, calibration=None, min_agreement=0.0, min_coverage=0.0, ledger=ledger or self.ledger)

    def spent(self) -> JudgeUsage:
        """What it has been asked and has cost, in its ledger."""
        return self._ledger().spent(self.identity)

    async def close(self) -> None:
        """Closes its connections and its ledger."""
        await self.endpoint.close()
        if self._state.ledger is not None:
            self._state.ledger.close()

    @abstractmethod
    def _asks(self) -> dict[str, Any]:
        """What its prompts are made of."""

    def _asker(self) -> JudgeClient:
        if not self._state.ready:
            self.prepare(root=Path(), folder=None)
        return JudgeClient(endpoint=self.endpoint, ledger=self._ledger(), budget=self.budget, judge=self.identity)

    def _ledger(self) -> JudgeLedger:
        if self._state.ledger is None:
            self._state.ledger = JudgeLedger(Path(self.ledger).resolve() if self.ledger is not None else None)
        return self._state.ledger


def unscored(name: str, heard: JudgeAnswer) -> Score:
    """No score, with the reason, and what the judge said as evidence. Nobody's answer gets a 0 for it."""
    blame = Blame.INFRASTRUCTURE if heard.unavailable else None
    return Score(value=None, reason=f"{name}: {heard.reason}", evidence=heard.text[:MAX_KEPT], blame=blame)
