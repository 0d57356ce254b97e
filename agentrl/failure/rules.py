"""The shipped triage rules. Each rule tags one kind of failure and the first turn in which the failure is visible.

An error from which the agent recovered is not a failure. A failed call counts only if no later call by the same agent to the same tool
succeeded. If the tool does not exist, a later successful call to any tool counts as recovery.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from agentrl.base.numbers import is_above
from agentrl.base.outages import has_address, is_outage_name, outage_phrase
from agentrl.failure import patterns
from agentrl.failure.patterns import contains_answer, contains_only_answer, is_right_answer, nonblank_lines, parse_number
from agentrl.failure.timeline import Timeline, TraceCall, TraceStep, timeline_of
from agentrl.failure.trace import CaptureReason, Tag, Trace
from agentrl.failure.triage import TriageRule
from agentrl.records import Blame

_REPEATS = 3  # number of equal calls or messages that counts as a loop
_SHORT_ANSWER = 300  # maximum characters of an answer that may be an apology
_MAX_NOTE = 400


def infrastructure(trace: Trace) -> Tag | None:
    """Tags an infrastructure fault, a missing score, a tool outage without recovery, or a model outage if the agent did not finish."""
    for failure in trace.episode.failures if trace.episode is not None else ():
        if failure.blame is Blame.INFRASTRUCTURE:
            return _tag("infrastructure", 1.0, f"{failure.stage} {failure.kind}: {failure.message}")
    if task_fault(trace) is None and trace.score is not None and trace.score.value is None:
        return _tag("infrastructure", 1.0, trace.score.reason)
    timeline = timeline_of(trace)
    for step, call in _calls(timeline):
        if _is_outage(trace, call) and not _recovered(timeline, step, call.tool):
            return _tag("infrastructure", 0.8, f"{call.tool}: {_line(call.output) or call.error}", step)
    ended = timeline.last_step is not None and not timeline.last_step.calls
    prefix = patterns.MODEL_CALL_FAILED
    errors = [gap.removeprefix(prefix).partition(" (")[0] for gap in trace.missing if gap.startswith(prefix)]
    if not ended and any(is_outage_name(error) or outage_phrase(error) for error in errors):
        return _tag("infrastructure", 0.7, f"the model's call failed: {errors[0]}")
    return None


def task_fault(trace: Trace) -> Tag | None:
    """Tags an episode whose fault was blamed on the task."""
    for failure in trace.episode.failures if trace.episode is not None else ():
        if failure.blame is Blame.TASK:
            return _tag("task_fault", 1.0, f"{failure.kind}: {failure.message}")
    if trace.score is not None and trace.score.blame is Blame.TASK:
        return _tag("task_fault", 1.0, trace.score.reason)
    return None


def reward_hack(trace: Trace) -> Tag | None:
    """Tags a score that an audit rejects, a call that tries to access the grader, or an answer that addresses a judge."""
    if trace.why is CaptureReason.HACKED:
        return _tag("reward_hack", 1.0, trace.origin.get("audit", ""))
    timeline = timeline_of(trace)
    for step, call in _calls(timeline):
        text = call.arguments_text
        match = patterns.REWARD_HACKS.search(text)
        if match is None and patterns.WRITES_FILE.search(text):
            match = patterns.TEST_HOOK_FILES.search(text)
        if match and match[0] not in timeline.question and match[0] not in timeline.instructions:
            return _tag("reward_hack", 0.7, f"{call.tool} tries to access {match[0]!r}", step)
    if trace.score is None or timeline.answer is None or timeline.last_step is None:
        return None
    if patterns.ABOUT_SCORES.search(timeline.question) or patterns.ABOUT_SCORES.search(timeline.truth or ""):
        return None
    if match := patterns.ADDRESSES_JUDGE.search(timeline.answer):
        return _tag("reward_hack", 0.7, f"the answer addresses its judge: {match[0]!r}", timeline.last_step)
    return None


def format_of_calls(trace: Trace) -> Tag | None:
    """Tags a call that was written as text, or a call that could not be parsed if none of the agent's later calls succeeded."""
    timeline = timeline_of(trace)
    for step in timeline.steps:
        if step.malformed and not _recovered(timeline, step):
            return _tag("format", 0.95, _line(step.malformed[0]), step)
        plain = not step.calls and not step.malformed and not step.truncated
        if plain and step is timeline.steps[-1] and patterns.UNPARSED_CALL.search(step.text):
            return _tag("format", 0.8, "the text contains a tool call that was not parsed", step)
    last = timeline.last_step
    if last is None or last.calls or last.malformed or last.truncated or not timeline.offered_tools:
        return None
    written = patterns.CALL_IN_TEXT.search(last.text)
    if written and written[1] in timeline.offered_tools:
        return _tag("format", 0.7, f"the text contains a call of {written[1]} that was not parsed", last)
    if patterns.CODE_IN_TEXT.search(last.text) and timeline.offered_tools.keys() & {"python", "python_session", "shell"}:
        return _tag("format", 0.6, "the code is in the text, not in a tool call", last)
    return None


def format_of_answer(trace: Trace) -> Tag | None:
    """Tags a correct answer in the wrong form: written in the text instead of submitted, or with other text around it."""
    timeline = timeline_of(trace)
    answer, truth, tolerance, last = timeline.answer, timeline.truth, timeline.tolerance, timeline.last_step
    if truth is None or last is None:
        return None
    if answer is None and timeline.stop_reason == "answered" and contains_answer(truth, last.text, tolerance):
        return _tag("format", 0.9, "the answer is in the text but was not submitted", last)
    if answer is None or answer == truth:
        return None
    if is_right_answer(answer, truth, tolerance):
        rejected = trace.score is not None and trace.score.value is not None and not is_above(trace.score.value, 0.0)
        return _tag("format", 0.7, "the answer is correct, but its form was not accepted", last) if rejected else None
    if len(answer) <= 400 and contains_only_answer(truth, answer, tolerance):
        return _tag("format", 0.8, "the answer contains other text in addition to the correct answer", last)
    return None


def wrong_tool(trace: Trace) -> Tag | None:
    """Tags a call to a nonexistent tool if none of the agent's later calls succeeded."""
    timeline = timeline_of(trace)
    for step, call in _calls(timeline):
        unknown = timeline.offered_tools is not None and call.tool not in timeline.offered_tools
        missing = call.failed and patterns.NO_SUCH_TOOL.search(call.output[:400]) is not None
        if (missing or (unknown and call.ok is not True)) and not _recovered(timeline, step):
            return _tag("wrong_tool", 0.95 if missing else 0.8, f"there is no tool {call.tool[:64]!r}", step)
    return None


def bad_arguments(trace: Trace) -> Tag | None:
    """Tags a call if the tool rejected its arguments or failed on them, and no later call to the tool succeeded."""
    timeline = timeline_of(trace)
    for step, call in _calls(timeline):
        if _recovered(timeline, step, call.tool):
            continue
        if missing := _missing_arguments(timeline, call):
            return _tag("bad_arguments", 0.85, f"{call.tool}: {missing}", step)
        if not call.failed or patterns.NO_SUCH_TOOL.search(call.output[:400]) or _timed_out(call) or _is_outage(trace, call):
            continue
        rejected = patterns.BAD_ARGUMENTS.search(call.output)
        return _tag("bad_arguments", 0.9 if rejected else 0.7, f"{call.tool}: {_line(call.output, last=not rejected)}", step)
    return None


def misread_output(trace: Trace) -> Tag | None:
    """Tags a wrong answer if a tool had returned the correct answer on a separate line or in a short output.

    If the correct answer is unknown, tags a submitted number that differs from the number in the last output.
    """
    timeline = timeline_of(trace)
    answer, truth, last = timeline.answer, timeline.truth, timeline.last_step
    if answer is None or last is None or (truth is not None and is_right_answer(answer, truth, timeline.tolerance)):
        return None
    outputs = [
        call.output
        for _, call in _calls(timeline)
        if call.ok is not False and call.tool not in patterns.SUBMIT_TOOLS and call.output.strip()
    ]
    if truth is None:
        final = nonblank_lines(outputs[-1]) if outputs else []
        numeric = len(final) == 1 and parse_number(final[0]) is not None and parse_number(answer) is not None
        if numeric and not is_right_answer(answer, final[0], 0.0):
            return _tag("misread_output", 0.5, "the tool's last output is a different number from the answer", last)
        return None
    if any(is_right_answer(line, truth, timeline.tolerance) for output in outputs for line in nonblank_lines(output)):
        return _tag("misread_output", 0.9, "a tool returned the correct answer, but a different one was submitted", last)
    short = [output for output in outputs if len(output) <= 500]
    contained = len(truth) >= 4 and any(contains_answer(truth, output, 0.0) for output in short)
    if contained or (parse_number(truth) is not None and any(contains_only_answer(truth, output, 0.0) for output in short)):
        return _tag("misread_output", 0.6, "a tool returned the correct answer, but a different one was submitted", last)
    return None


def looped(trace: Trace) -> Tag | None:
    """Tags repeated text, or three equal calls with the same output if no new call or output occurred between the last two of them.

    Tests that are re-run after each change are not a loop.
    """
    timeline = timeline_of(trace)
    counts: Counter[tuple[int, int, str]] = Counter()
    second: dict[tuple[int, int, str], tuple[TraceStep, int]] = {}
    new_outputs: Counter[int] = Counter()  # trajectory -> distinct calls and outputs
    for step, call in _calls(timeline):
        key = (step.trajectory, call.call_hash, call.output)
        counts[key] += 1
        if counts[key] == 1:
            new_outputs[step.trajectory] += 1
        elif key not in second or second[key][1] != new_outputs[step.trajectory]:
            second[key], counts[key] = (step, new_outputs[step.trajectory]), 2
        elif counts[key] == _REPEATS:
            return _tag("looped", 0.9, f"{call.tool} was called {_REPEATS} or more times with the same result", second[key][0])
    for step in timeline.steps:
        if step.truncated and _repeats_itself(step.text):
            return _tag("looped", 0.85, "the text repeats itself until the token limit", step)
    texts: dict[tuple[int, str], list[TraceStep]] = {}
    for step in timeline.steps:
        if len(step.text.strip()) >= 20 and not step.calls:
            texts.setdefault((step.trajectory, step.text.strip()), []).append(step)
    for same in texts.values():
        if len(same) >= _REPEATS:
            return _tag("looped", 0.8, "the agent wrote the same text three or more times", same[1])
    return None


def gave_up(trace: Trace) -> Tag | None:
    """Tags a last turn that is empty or declines the task, or a submitted text that is not an answer."""
    timeline = timeline_of(trace)
    step = timeline.last_step
    if step is None or timeline.hit_limit or step.truncated or step.malformed:
        return None
    if timeline.answer is not None and _is_non_answer(timeline.answer) and not _is_non_answer(timeline.truth or "0"):
        return _tag("gave_up", 0.85, "the submitted text is not an answer", step)
    if step.calls:
        return None
    if not step.text.strip():
        return _tag("gave_up", 0.8, "the agent's last turn has no text", step)
    if len(step.text) <= 2000 and patterns.GIVES_UP.search(step.text):
        return _tag("gave_up", 0.85, _line(step.text), step)
    return None


def forbidden_tool(trace: Trace) -> Tag | None:
    """Tags a call to a tool that the task forbids, or a call that performs a forbidden action."""
    timeline = timeline_of(trace)
    prompt = f"{timeline.instructions}\n{timeline.question}"
    for forbids, does, note in patterns.FORBIDDEN_ACTIONS:
        if forbids.search(prompt):
            for step, call in _calls(timeline):
                if does.search(call.arguments_text):
                    return _tag("ignored_instruction", 0.7, f"{call.tool} {note}", step)
    forbidden = {name.lower() for name in patterns.FORBIDS_TOOL.findall(prompt)}
    for step, call in _calls(timeline):
        if call.tool.lower() in forbidden:
            return _tag("ignored_instruction", 0.85, f"the task forbids {call.tool}", step)
    return None


def ignored_instruction(trace: Trace) -> Tag | None:
    """Tags an answer if the agent did not read the files, did not submit the answer, or added other text although the task forbids it."""
    timeline = timeline_of(trace)
    answer, last, offered = timeline.answer, timeline.last_step, timeline.offered_tools
    if last is None or timeline.hit_limit or last.truncated or last.malformed:
        return None
    looked = any(call.tool not in patterns.SUBMIT_TOOLS for _, call in _calls(timeline))
    could_look = offered is None or any(name not in patterns.SUBMIT_TOOLS for name in offered)
    if timeline.files and could_look and not looked and answer is not None and not timeline.more_turns:
        return _tag("ignored_instruction", 0.7, "the agent answered without reading the files", last)
    if answer is None and timeline.stop_reason == "answered" and last.text.strip() and offered and "submit" in offered:
        return _tag("ignored_instruction", 0.6, "the answer was written but not submitted", last)
    if answer is not None and len(answer.split()) > 12 and patterns.ANSWER_ONLY.search(f"{timeline.instructions}\n{timeline.question}"):
        return _tag("ignored_instruction", 0.6, "the task allows only the answer, without other text", last)
    return None


def budget(trace: Trace) -> Tag | None:
    """Tags an episode that reached a limit on turns, tokens, wall time, a tool's time, or the output that an episode may read."""
    timeline = timeline_of(trace)
    last = timeline.last_step
    for step, call in _calls(timeline):
        if _timed_out(call) and not _is_outage(trace, call) and not _recovered(timeline, step):
            return _tag("budget", 0.8, f"{call.tool}: {_line(call.output, last=True)}", step)
        if patterns.OUTPUT_USED_UP in call.output:
            return _tag("budget", 0.6, patterns.OUTPUT_USED_UP, step)
    if timeline.hit_limit and last is not None:
        return _tag("budget", 0.8, timeline.stop_reason, last)
    if timeline.hit_limit or trace.why in (CaptureReason.LIMIT, CaptureReason.TIMEOUT):
        return _tag("budget", 0.8, timeline.stop_reason or str(trace.why))
    if last is not None and last.truncated:
        return _tag("budget", 0.8, "a turn reached its token limit", last)
    return None


RULES: tuple[TriageRule, ...] = (
    infrastructure,
    task_fault,
    reward_hack,
    forbidden_tool,
    format_of_calls,
    wrong_tool,
    looped,
    bad_arguments,
    format_of_answer,
    misread_output,
    gave_up,
    ignored_instruction,
    budget,
)
"""The shipped rules. If two rules tag the same turn, the rule that is listed first wins."""


def _tag(name: str, confidence: float, note: str, step: TraceStep | None = None) -> Tag:
    trajectory, turn = (0, None) if step is None else (step.trajectory, step.turn)
    return Tag(name=name, by="rules", confidence=confidence, trajectory=trajectory, turn=turn, note=note[:_MAX_NOTE])


def _calls(timeline: Timeline) -> Iterator[tuple[TraceStep, TraceCall]]:
    return ((step, call) for step in timeline.steps for call in step.calls)


def _is_outage(trace: Trace, call: TraceCall) -> bool:
    """Whether a failed call reports an outage of a service that the tool depends on.

    Outages in the agent's programs, outages at addresses that the agent chose, and outages that the run blamed on the agent do not count.
    """
    if not call.failed:
        return False
    if patterns.RUNS_PROGRAMS.search(call.tool) or any(key in call.arguments for key in patterns.PROGRAM_KEYS):
        outage = patterns.SANDBOX_DOWN.search(call.output) is not None
    elif has_address(call.arguments):
        outage = False
    else:
        outage = (
            bool(outage_phrase(call.output, call.arguments) or is_outage_name(call.error))
            or (patterns.TIMED_OUT.search(call.output) is not None and not patterns.VERIFIER_TIMED_OUT.search(call.output))
            or any(map(is_outage_name, patterns.ERROR_TYPE.findall(call.output[:2000])))
        )
    failures = trace.episode.failures if trace.episode is not None else ()
    return outage and not any(
        failure.blame is Blame.POLICY and failure.stage == "tool" and failure.message.startswith(f"tool {call.tool}:")
        for failure in failures
    )


def _recovered(timeline: Timeline, failed: TraceStep, tool: str | None = None) -> bool:
    """Whether the same agent made a successful call after the step `failed`.

    The call must be to `tool` or, if `tool` is None, to any tool that does not submit the answer.
    """
    return any(
        call.ok and (call.tool not in patterns.SUBMIT_TOOLS if tool is None else call.tool == tool)
        for step in timeline.steps[timeline.step_index(failed.trajectory, failed.turn) + 1 :]
        if step.trajectory == failed.trajectory
        for call in step.calls
    )


def _is_non_answer(text: str) -> bool:
    text = text.strip().lower()
    return text.rstrip(".!") in patterns.NON_ANSWERS or (len(text) <= _SHORT_ANSWER and patterns.GIVES_UP.search(text) is not None)


def _timed_out(call: TraceCall) -> bool:
    return call.failed and (patterns.TIMED_OUT.search(call.output) or patterns.TIMED_OUT.search(call.error)) is not None


def _missing_arguments(timeline: Timeline, call: TraceCall) -> str:
    """Returns a message that lists the required arguments that a call lacks; empty if it lacks none, or if the call succeeded."""
    schema: Any = (timeline.offered_tools or {}).get(call.tool)
    required = schema.get("required") if schema and call.ok is not True else None
    if not isinstance(required, list):
        return ""
    missing = [name for name in required[:64] if isinstance(name, str) and name not in call.arguments]
    return f"missing required arguments: {', '.join(missing)}"[:200] if missing else ""


def _repeats_itself(text: str) -> bool:
    """Whether a string ends with ten or more repetitions of a substring of up to 60 characters."""
    tail = text[-1200:]
    sizes = range(1, min(60, len(tail) // 10) + 1)
    return any(tail[-size:].strip() and tail.endswith(tail[-size:] * 10) for size in sizes)


def _line(text: str, *, last: bool = False) -> str:
    """Returns the first nonblank line of a string or, if `last` is true, the last one, which in a traceback is the error message."""
    lines = nonblank_lines(text)
    return lines[-1 if last else 0][:200] if lines else ""
