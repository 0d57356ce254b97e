"""Frames of `agentrl watch`: they fit into every terminal, and hostile texts have no effect on it."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, Group

from agentrl.observe.terminal import sparkline
from agentrl.watch import frames
from agentrl.watch.frames import (
    Curve,
    EpisodeLine,
    Part,
    RunFrame,
    RunLine,
    Size,
    Transcript,
    plot,
    run_frame,
    runs_frame,
    transcript_frame,
)

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31m\u202eevil\u200b\x9b6n\rover\nmore\t漢字e\u0301\x00[red]x[/red]"
TEXTS = st.one_of(st.just(HOSTILE), st.text(max_size=60))
SIZES = st.builds(Size, st.integers(1, 140), st.integers(1, 60))
NUMBERS = st.floats(-1e9, 1e9)
EPISODES = st.builds(
    EpisodeLine,
    id=TEXTS,
    kind=TEXTS,
    score=st.none() | NUMBERS,
    outcome=TEXTS,
    turns=st.integers(0, 10**6),
    tokens=st.integers(0, 10**9),
    version=st.none() | st.integers(0, 10**6),
)
CURVES = st.builds(Curve, label=TEXTS, values=st.lists(NUMBERS, max_size=300).map(tuple))
RUNS = st.builds(
    RunFrame,
    name=TEXTS,
    state=TEXTS,
    stage=TEXTS,
    step=st.integers(0, 10**6),
    steps=st.none() | st.integers(1, 10**6),
    left_s=st.none() | st.floats(0, 1e6),
    success=st.lists(st.tuples(TEXTS, NUMBERS), max_size=3).map(tuple),
    reward=st.none() | CURVES,
    curves=st.lists(CURVES, max_size=6).map(tuple),
    parts=st.lists(st.tuples(TEXTS, st.floats(0, 1)), max_size=5).map(tuple),
    restarts=st.lists(st.tuples(TEXTS, st.integers(0, 9)), max_size=3).map(tuple),
    ledger=TEXTS,
    alerts=st.lists(TEXTS, max_size=5).map(tuple),
    episodes=st.lists(EPISODES, max_size=30).map(tuple),
    selected=st.integers(0, 40),
    notes=st.lists(TEXTS, max_size=3).map(tuple),
)
LINES = st.builds(
    RunLine,
    name=TEXTS,
    state=TEXTS,
    step=st.integers(0, 99),
    steps=st.none() | st.integers(1, 99),
    reward=st.none() | NUMBERS,
    changed_s=st.floats(0, 1e7),
)


def render(lines: list[object], size: Size) -> str:
    """Returns the output to a terminal of this size, without colours."""
    console = Console(
        file=io.StringIO(), width=size.width, height=size.height, force_terminal=True, color_system=None, legacy_windows=False
    )
    console.print(Group(*lines), no_wrap=True, crop=True)  # type: ignore[arg-type]
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def check(lines: list[object], size: Size) -> str:
    assert len(lines) <= max(1, size.height)
    text = render(lines, size)
    rows = text.splitlines()
    assert len(rows) <= max(1, size.height) and all(cell_len(row) <= size.width for row in rows)
    without = re.sub(r"\x1b\[[0-9;]*m", "", text)  # rich's styles, such as bold
    assert all(char.isprintable() or char == "\n" for char in without), "no control character of a text reaches the terminal"
    return without


@given(RUNS, SIZES)
def test_every_frame_of_a_run_fits_and_is_printable(run: RunFrame, size: Size) -> None:
    check(list(run_frame(run, size)), size)


@given(st.lists(LINES, max_size=40), st.integers(0, 50), SIZES)
def test_every_list_of_runs_fits(runs: list[RunLine], selected: int, size: Size) -> None:
    check(list(runs_frame(runs, selected, size, title=HOSTILE, notes=[HOSTILE])), size)


@given(st.lists(st.builds(Part, who=TEXTS, text=TEXTS), max_size=20), st.integers(-5, 500), SIZES)
def test_every_transcript_fits_at_every_scroll_position(parts: list[Part], top: int, size: Size) -> None:
    transcript = Transcript(title=HOSTILE, facts=HOSTILE, parts=tuple(parts), top=top)
    check(list(transcript_frame(transcript, size)), size)
    assert 0 <= transcript.top <= len(transcript.lines(max(size.width, 20)))


RUN = RunFrame(
    name="quickstart",
    state="running",
    stage="train",
    step=12,
    steps=24,
    left_s=103.0,
    success=(("held-out", 0.812), ("real", 0.75)),
    reward=Curve(label="reward", values=tuple(number / 24 for number in range(24))),
    curves=tuple(Curve(label=name, values=(1.0, 2.0, 3.0)) for name in ("loss", "entropy", "kl", "tokens/s")),
    parts=(("server", 0.97), ("learner", 0.18)),
    restarts=(("server", 1), ("worker", 0)),
    ledger="9,848 tokens sampled = 9,414 trained + 434 excluded + 0 open",
    alerts=("step 3: entropy fell",),
    running=16,
    episodes=tuple(
        EpisodeLine(id=f"g{number:06d}-0-a0", kind="total", score=1.0, outcome="solved", turns=3, tokens=77, version=11)
        for number in range(30)
    ),
    selected=1,
)


def test_a_terminal_of_80_by_24_shows_all_sections() -> None:
    size = Size(80, 24)
    text = check(list(run_frame(RUN, size)), size)
    for part in ("quickstart  running  train  episodes in flight: 16", "12/24  about 1 min 43 s left", "held-out 0.812 · real 0.750"):
        assert part in text
    for part in ("server 97% · learner 18%", "server 1", "9,848 tokens sampled", "entropy fell", "loss", "tokens/s", "> g000001-0-a0"):
        assert part in text
    assert "worker" not in text and len(text.splitlines()) == 24 and "q quit" in text.splitlines()[-1]


def test_a_narrow_and_low_terminal_keeps_title_list_and_keys() -> None:
    size = Size(40, 8)
    rows = check(list(run_frame(RUN, size)), size).splitlines()
    assert rows[0].startswith("quickstart  running") and "> g000001-0-a0" in "\n".join(rows) and "q quit" in rows[-1]


def test_a_selected_episode_is_always_visible() -> None:
    for selected in range(30):
        run = RunFrame(name="x", state="running", episodes=RUN.episodes, selected=selected)
        for height in (5, 9, 24):
            assert f"> g{selected:06d}" in "\n".join(line.plain for line in run_frame(run, Size(80, height)))


@pytest.mark.parametrize("values", [(0.0, 5e-324), (0.0, 2e-308), (-1.7e308, 1.7e308), (1.0, 1.0)])
def test_curves_of_extreme_values(values: tuple[float, float]) -> None:
    """The inverse of a difference, or the difference, may be infinite."""
    assert all(len(row) == 4 for row in plot(values, 4, 2)) and len(sparkline(values)) == 2


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200), st.integers(1, 80), st.integers(1, 6))
def test_a_plot_has_its_size_and_a_dot_in_each_column_with_values(values: list[float], width: int, height: int) -> None:
    rows = plot(values, width, height)
    assert len(rows) == height and all(len(row) == width for row in rows)


def test_a_plot_rises_with_its_values() -> None:
    assert plot([0, 1, 2, 3, 4, 5, 6, 7], 4, 2) == ["⠀⠀⣠⠞", "⣠⠞⠁⠀"]
    assert plot([], 2, 1) == ["  "] and plot([5.0], 1, 1) == ["⠤"]


def test_long_transcripts_are_bounded_with_a_note() -> None:
    long = Transcript(title="x", facts="", parts=(Part(who="tool", text="y\n" * (2 * frames.MAX_LINES)),))
    assert (
        len(long.lines(80)) == frames.MAX_LINES + 2 and f"only the first {frames.MAX_LINES:,} lines are shown" == long.lines(80)[-1].plain
    )
    wide = Transcript(title="x", facts="", parts=(Part(who="tool", text="e\u0301" * 90_000),))
    assert all(len(line.plain) <= 4 * 80 for line in wide.lines(80))
