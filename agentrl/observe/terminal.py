"""Shows the progress of a run: one line for each stage, step and evaluation and, if the output is a terminal, a live panel below them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.console import Group as Rows
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.observe.exclusions import exclusion_reason, printable_text, why_nothing_learned
from agentrl.protocols import Interval, Tracker
from agentrl.records import Group

_REASONS_REPORTED = 5  # maximum number of exclusion reasons reported at their first occurrence; the summary counts all
_SHOWN_STEPS = 256  # number of newest steps used for the curve and the time estimate
_SPARKS = "▁▂▃▄▅▆▇█"
_SPLITS = {"heldout": "held-out", "heldout_real": "real"}


@dataclass(slots=True, kw_only=True)
class Progress:
    """The current state of a run, as the terminal shows it.

    The tracker writes the fields while the terminal's refresh thread reads them, so dictionaries are replaced and never changed in place.
    """

    name: str
    steps: int
    stage: str = ""
    detail: str = ""
    step: int = 0
    counted: tuple[int, int] | None = None  # (attempts done, total) in an evaluation or while sampling
    episodes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> episodes
    idle_reported: bool = False
    swaps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    heldout: dict[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_SHOWN_STEPS))
    began: float = field(default_factory=time.monotonic)
    training: bool = False
    first_step: int = 0  # first step that this driver runs
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=_SHOWN_STEPS))  # start of training, then the end of each step

    def begin_stage(self, name: str, detail: str) -> None:
        """Starts a stage."""
        self.stage, self.detail, self.counted = name, detail, None
        if name == "train" and not self.training:
            self.training, self.step_times = True, deque([time.monotonic()], maxlen=_SHOWN_STEPS)

    def finished_group(self, group: Group) -> list[str]:
        """Counts a finished group. Returns the reasons for excluding its episodes that have not occurred before, as long
        as they are among the first five reasons of the run."""
        self.episodes += len(group.episodes)
        known = min(len(self.left_out), _REASONS_REPORTED)
        counts = dict(self.left_out)
        for scored in group.episodes:
            if reason := exclusion_reason(scored):
                counts[reason] = counts.get(reason, 0) + 1
        self.left_out = counts
        return list(counts)[known:_REASONS_REPORTED]

    def finished_step(self, step: int, metrics: Mapping[str, float]) -> str:
        """Records the metrics of a step. If this is the first step in which nothing was learned, returns the reason; otherwise ""."""
        self.step, self.metrics = step, dict(metrics)
        if self.training:  # otherwise an earlier driver ran the step
            self.step_times.append(time.monotonic())
            if not self.first_step:
                self.first_step = step
                if step > 1:  # the groups of a resumed run's first step may have been finished by an earlier driver
                    self.step_times.popleft()
        self.swaps += "swap_stall_ms" in metrics
        if "reward_mean" in metrics:
            self.rewards.append(metrics["reward_mean"])
        self.evaluated({key: metrics[key] for key in _SPLITS if key in metrics})
        idle = why_nothing_learned([metrics], self.left_out) if metrics.get("tokens_trained") == 0 and not self.idle_reported else ""
        self.idle_reported = self.idle_reported or bool(idle)
        return idle

    def evaluated(self, rates: Mapping[str, float]) -> None:
        """Records the success rates on held-out splits."""
        self.heldout = {**self.heldout, **rates}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the tracker was created."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float | None:
        """The estimated seconds until the last step is done, from the mean duration of the newest steps; None if there is no estimate."""
        done = len(self.step_times) - 1
        if done < 1 or not self.steps or self.step >= self.steps:
            return None
        return (self.step_times[-1] - self.step_times[0]) / done * (self.steps - self.step)


class TerminalTracker(Tracker):
    """Prints a line for each stage, step, evaluation and alert and, if the output is a terminal, shows a live panel below the lines.

    Args:
        steps: number of learner steps in the run, for the progress bar and the time estimate; 0 means unknown.
        stderr: print to standard error instead of standard output.
    """

    def __init__(self, name: str, *, steps: int = 0, stderr: bool = False) -> None:
        self._progress, self._console = Progress(name=name, steps=steps), Console(stderr=stderr)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._panel, refresh_per_second=4, transient=True)
            self._live.start()

    def stage(self, name: str, detail: str = "") -> None:
        """Prints the start of a stage."""
        self._progress.begin_stage(name, detail)
        text = Text(name, style="bold cyan")
        self._print(text.append(f"  {detail}", style="default") if detail else text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the metrics of a finished step."""
        progress = self._progress
        progress.finished_step(step, metrics)
        total = f"/{progress.steps}" if progress.steps else ""
        parts = [f"step {step:>{len(str(progress.steps))}}{total}", *_figures(metrics)]
        parts += [f"{label} {metrics[key]:.3f}" for key, label in _SPLITS.items() if key in metrics]
        if metrics.get("episodes_left_out"):
            parts.append(f"excluded {metrics['episodes_left_out']:.0f}")
        if reachable := metrics.get("excluded_policy_reachable"):
            parts.append(f"policy-reachable faults {reachable:.1%}")
        if self._live is None and progress.left_s is not None:  # otherwise the panel shows it
            parts.append(f"about {_clock(progress.left_s)} left")
        self._print(Text("  ".join(parts)))

    def progress(self, index: int, group: Group) -> None:
        """Counts a finished group for the panel."""
        self._progress.finished_group(group)

    def evaluating(self, done: int, total: int) -> None:
        """Updates the progress bar of an evaluation."""
        self._progress.counted = (done, total)

    def evaluated(self, phase: str, rates: Mapping[str, Interval]) -> None:
        """Prints the success rates from an evaluation."""
        self._progress.evaluated({split: rate.value for split, rate in rates.items()})
        parts = [f"{_SPLITS.get(split, split)} {r.value:.3f} [{r.ci_low:.3f}, {r.ci_high:.3f}] n={r.n}" for split, r in rates.items()]
        self._print(Text(f"{phase}: ", style="bold green").append("  ".join(parts), style="default"))

    def alert(self, text: str) -> None:
        """Prints an alert."""
        self._print(Text("alert: ", style="bold red").append(printable_text(text), style="default"))

    def close(self) -> None:
        """Removes the live panel."""
        if self._live:
            self._live.stop()

    def _print(self, text: Text) -> None:
        clock = Text(f"[{_clock(self._progress.elapsed_s):>7}] ", style="dim")
        self._console.print(clock.append(text), soft_wrap=True)

    def _panel(self) -> RenderableType:
        progress = self._progress
        left = f" · about {_clock(progress.left_s)} left" if progress.left_s is not None else ""
        title = Text(f" {progress.name} ", style="bold").append(f"{progress.stage} ", style="cyan")
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", min_width=10)
        rows.add_column(ratio=1)
        if progress.steps:
            rows.add_row("steps", _bar(progress.step, progress.steps))
        if progress.counted:
            rows.add_row("attempts", _bar(*progress.counted))
        if progress.rewards:
            rows.add_row("reward", Text(f"{progress.rewards[-1]:.3f}  ").append(sparkline(progress.rewards), style="green"))
        if progress.heldout:
            rows.add_row("success", "  ".join(f"{_SPLITS.get(key, key)} {value:.3f}" for key, value in progress.heldout.items()))
        rows.add_row("episodes", f"{progress.episodes:,}  excluded {sum(progress.left_out.values()):,}  swaps {progress.swaps}")
        figures = "  ".join(_figures({key: value for key, value in progress.metrics.items() if key != "reward_mean"}))
        body = Rows(rows, Text(figures, style="dim")) if figures else rows
        return Panel(
            body, title=title, title_align="left", subtitle=f"{_clock(progress.elapsed_s)}{left}", subtitle_align="right", width=78
        )


def _figures(metrics: Mapping[str, float]) -> list[str]:
    """Returns texts with the main metrics of a step. Metrics that the step does not have are omitted."""
    shown: list[str] = []
    if "reward_mean" in metrics:
        shown.append(f"reward {metrics['reward_mean']:.3f}")
    elif "episodes" in metrics:
        shown.append("reward -")  # nothing was scored
    if metrics.get("weights_changed") == 0:
        shown.append("weights unchanged")
    if "tokens_per_s" in metrics:
        shown.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    if "staleness_mean" in metrics:
        shown.append(f"staleness {metrics['staleness_mean']:.1f} (max {metrics.get('staleness_max', 0):.0f})")
    if "swap_stall_ms" in metrics:
        shown.append(f"swap {metrics['swap_stall_ms']:.0f} ms")
    if "swap_probe_max_abs_diff" in metrics:
        shown.append(f"probe {metrics['swap_probe_max_abs_diff']:.0e}")
    return shown


def _bar(done: int, total: int) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=total, completed=done, width=44, complete_style="cyan", finished_style="green"), f"{done}/{total}")
    return row


def sparkline(values: Iterable[float], width: int = 40) -> str:
    """Returns the newest `width` values as one line of block characters, or an empty string if there are no values. All values must be
    finite."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    return "".join(_SPARKS[level(value, low, high, len(_SPARKS) - 1)] for value in shown)


def level(value: float, low: float, high: float, highest: int, *, flat: int = 0) -> int:
    """Maps a value between `low` and `high` to an integer from 0 to `highest`. Returns `flat` if `low` and `high` are equal.

    `value`, `low` and `high` must be finite.
    """
    span = high / 2 - low / 2  # halved first, because `high - low` may overflow
    return round((value / 2 - low / 2) / span * highest) if span > 0 else flat


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
