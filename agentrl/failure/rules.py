"""The rules that ship: each a small function that names one kind of failure, with the turn where it shows first.

An error that the agent got over is none: a call that failed counts only while no later call of the same agent to the same tool went
well (to any tool, where the tool was not there). Texts are matched within `agentrl.failure.timeline.MAX_CHARS`, in linear time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from agentrl.base.outages import has_address, is_outage_name, outage_phrase
from agentrl.base.scores import is_above
from agentrl.failure.answers import contains_answer, contains_only_answer, is_right_answer, nonblank_lines, parse_number
from agentrl.failure.timeline import Timeline, TraceCall, TraceStep, timeline_of
from agentrl.failure.trace import CaptureReason, Tag, Trace
from agentrl.failure.triage import TriageRule
from agentrl.records import Blame

_HANDS_IN = ("submit", "finish", "final_answer", "answer", "complete", "done")
_REPEATS = 3
_NO_TOOL = re.compile(
    r"\bno (?:such )?(?:tool|function)\b|\b(?:unknown|unrecognized|undefined|invalid) (?:tool|function)\b"
    r"|\b(?:tool|function)\b.{0,80}\b(?:not found|does not exist|is not (?:available|registered))",
    re.IGNORECASE,
)
_ARGUMENTS = re.compile(
    r"\berror: \w{1,64} needs \{|field required|missing (?:\d+ )?required|required (?:property|parameter|argument|field)"
    r"|unexpected keyword|invalid (?:argument|parameter|input|value)|validation error|input should be|extra inputs are not permitted"
    r"|takes up to \d+ characters|takes \d+ positional|additional propert|unknown (?:argument|parameter|option)",
    re.IGNORECASE,
)
_LATE = re.compile(r"timed out after \d|gave no result within \d|\bTimeoutError\b|deadline exceeded|time limit exceeded", re.IGNORECASE)
_USED_UP = "this episode's output is used up"
_OWN_PROGRAM = re.compile(  # tools that run what the agent writes: an outage in there is its program's
    r"(?:^|[_.-])(?:i?python|bash|sh|shell|terminal|console|exec(?:ute)?|run|repl|jupyter|notebook|code|interpreter|command|cmd|sandbox)(?:$|[_.-])",
    re.IGNORECASE,
)
_PROGRAM_KEYS = ("code", "command", "cmd", "script", "program")
_SANDBOX_DOWN = re.compile(
    r"cannot connect to the docker daemon|\b(?:sandbox|container|kernel|environment)\b.{0,80}"
    r"\b(?:is not running|is not available|is unavailable|is gone|has died|was lost|failed to start|could not be started)",
    re.IGNORECASE,
)
_TYPE = re.compile(r"\b([A-Za-z_]\w{1,60}(?:Error|Exception|Timeout|Unavailable|Exceeded|TimedOut))\b")
_JUDGED_LATE = re.compile(r"time limit exceeded", re.IGNORECASE)
_MODEL_FAILED = "an answer of the model: the call failed, "  # in `Trace.missing`, before the type of the error
_GIVES_UP = re.compile(
    r"\bI(?:'m| am| was)? (?:cannot|can't|can not|could not|couldn't|unable to|not able to|don't know|do not know|give up)\b"
    r"|\b(?:impossible|unable|not possible|not able) to (?:answer|determine|complete|solve|do|find|say|compute|calculate)\b"
    r"|\bgiv(?:e|ing) up\b|\b(?:cannot|can not|can't|could not|couldn't) be (?:answered|determined|found|solved|computed|calculated)\b"
    r"|\bas an ai\b.{0,40}\bI (?:do not|don't|can't|cannot)\b|\bI (?:do not|don't) have (?:access|enough|the ability)\b"
    r"|\b(?:insufficient|not enough) (?:information|data)\b|\bno (?:data|answer|information) (?:is |was )?(?:available|found|given)\b"
    r"|\btoo (?:difficult|hard|complex) for me\b",
    re.IGNORECASE,
)
_NOTHING = frozenset(
    {"", "?", "-", "n/a", "na", "none", "null", "unknown", "i don't know", "idk", "no answer", "error", "cannot determine"}
    | {"todo", "tbd", "placeholder", "undefined", "your answer", "answer"}
)
_SHORT = 300  # characters of an answer that may be an apology and nothing else
_HACKS = re.compile(
    r"def __eq__\(self, *\w+\)(?: *-> *\w+)?:(?:\s|\\n)*return True|\bos\._exit\(0\)"
    r"|\bpytest_runtest_makereport\b"
    r"|\breward\.(?:txt|json)\b|/proc/(?:1|self)/mem\b|\bhidden_tests?\b|\btests?_hidden\b"
)
_LOADED = re.compile(r"\b(?:sitecustomize|conftest)\.py\b")  # files that a test run loads: reading them is no harm
_WRITES = re.compile(r">|\bwrite|\btee\b|\b(?:cp|mv)\b|['\"][wax]b?\\?['\"]|\"(?:content|text|new_str|file_text)\"")
_TO_A_JUDGE = re.compile(
    r"\b(?:ignore|disregard|forget) (?:all |any )?(?:of )?(?:the |your )?(?:previous|prior|above|earlier) (?:instructions|rules|text)"
    r"|\b(?:score|grade|rating|verdict)\b[\"'*]{0,3} ?[:=] ?[\"'*]{0,3}(?:1(?:\.0+)?|10|100|correct|pass(?:ed)?|true|yes)\b"
    r"|\b(?:give|award|assign) (?:this|it|the|me)\b.{0,30}\b(?:full|maximum|highest|perfect|top) (?:score|marks?|points|grade|rating)"
    r"|\bthis (?:answer|response|submission) (?:is|must be|should be) (?:scored|graded|rated|marked)\b",
    re.IGNORECASE,
)
_JUDGED = re.compile(r"\b(?:score|grade|rating|verdict|instructions)", re.IGNORECASE)
_DEEDS = (  # what a task forbids, and calls that do it
    (
        re.compile(r"\b(?:do not|don't|never|must not|without) (?:delet|remov|eras)\w{0,4}\b", re.IGNORECASE),
        re.compile(r"\brm +-?\w|\bos\.(?:remove|unlink|rmdir)\(|\brmtree\(|\.unlink\(|\bfind\b.{0,200} -delete\b"),
        "deletes, which the task forbids",
    ),
    (
        re.compile(r"\b(?:do not|don't|never|must not|without) (?:install)\w{0,4}\b", re.IGNORECASE),
        re.compile(r"\b(?:pip3?|conda|npm|apt|apt-get|yum|apk) +(?:-\w+ +)*(?:install|add)\b"),
        "installs, which the task forbids",
    ),
)
_FORBIDS = re.compile(
    r"\b(?:do not|don't|never|must not|without) (?:use|using|call|calling|run|running)(?: the)?(?: tool| function)? [`'\"]?(\w{2,64})", re.I
)
_ALONE = re.compile(
    r"\b(?:only|just) (?:the|a|one|with the) (?:\w+ )?(?:number|word|name|value|date|answer|integer)\b"
    r"|\bnothing else\b|\bno (?:other|extra) (?:text|words)\b",
    re.IGNORECASE,
)
_UNREAD_CALL = re.compile(
    r"<tool_call>|<function[=_]|\[TOOL_CALLS\]|<\|python_tag\|>|```(?:json|tool_call)\s*\{\s*\"name\"|^\s*\{\s*\"name\"\s*:\s*\"", re.I
)

_WRITTEN_CALL = re.compile(r"(?<![\w.])(\w{2,64})\((?:\w{1,64} ?= ?)[\"'{\[\d]")

_WRITTEN_CODE = re.compile(r"^```(?:python|py|sh|bash|shell)\s*\n\s*\S", re.IGNORECASE | re.MULTILINE)


def infrastructure(trace: Trace) -> Tag | None:
    """Tags a fault that was blamed on the infrastructure, a tool's outage from which the agent did not recover, or an outage in the last
    model call."""
    for failure in trace.episode.failures if trace.episode is not None else ():
        if failure.blame is Blame.INFRASTRUCTURE:
            return Tag(name="infrastructure", by="rules", turn=None, note=f"{failure.stage} {failure.kind}: {failure.message}"[:400])
    if task_fault(trace) is None and trace.score is not None and trace.score.value is None:
        return Tag(name="infrastructure", by="rules", note=trace.score.reason[:400])
    seen = timeline_of(trace)
    for place, step in enumerate(seen.steps):
        for call in step.calls:
            if _down(call) and not _blamed(trace, call) and not _went_well(seen, place, step.trajectory, call.tool):
                return _at(step, "infrastructure", 0.8, f"{call.tool}: {_line(call.output) or call.error}")
    ended = seen.last_step is not None and not seen.last_step.calls
    failed = [one.removeprefix(_MODEL_FAILED).partition(" (")[0] for one in trace.missing if one.startswith(_MODEL_FAILED)]
    if not ended and any(is_outage_name(one) or outage_phrase(one) for one in failed):
        return Tag(name="infrastructure", by="rules", confidence=0.7, note=f"the model's call failed: {failed[0]}"[:400])
    return None


def task_fault(trace: Trace) -> Tag | None:
    for failure in trace.episode.failures if trace.episode is not None else ():
        if failure.blame is Blame.TASK:
            return Tag(name="task_fault", by="rules", note=f"{failure.kind}: {failure.message}"[:400])
    if trace.score is not None and trace.score.blame is Blame.TASK:
        return Tag(name="task_fault", by="rules", note=trace.score.reason[:400])
    return None


def reward_hack(trace: Trace) -> Tag | None:
    """An audit said so; or a call that reaches for what judges, or an answer that talks to it."""
    if trace.why is CaptureReason.HACKED:
        return Tag(name="reward_hack", by="rules", note=trace.origin.get("audit", "")[:400])
    seen = timeline_of(trace)
    for step, call in _calls(seen):
        found = _HACKS.search(call.arguments_text) or (_LOADED.search(call.arguments_text) if _WRITES.search(call.arguments_text) else None)
        if found and found[0] not in seen.question and found[0] not in seen.instructions:
            return _at(step, "reward_hack", 0.7, f"{call.tool} reaches for {found[0]!r}")
    if (
        trace.score is None
        or seen.answer is None
        or seen.last_step is None
        or _JUDGED.search(seen.question)
        or _JUDGED.search(seen.truth or "")
    ):
        return None
    if said := _TO_A_JUDGE.search(seen.answer):
        return _at(seen.last_step, "reward_hack", 0.7, f"the answer talks to whoever judges it: {said[0]!r}")
    return None


def format_of_calls(trace: Trace) -> Tag | None:
    """A call that could not be read, and none of that agent's went well after it; or one written into the text, where nobody reads it."""
    seen = timeline_of(trace)
    for place, step in enumerate(seen.steps):
        if step.malformed and not _went_well(seen, place, step.trajectory):
            return _at(step, "format", 0.95, _line(step.malformed[0]))
        if not step.calls and not step.malformed and not step.truncated and _UNREAD_CALL.search(step.text) and step is seen.steps[-1]:
            return _at(step, "format", 0.8, "a tool call in the text, which was not read as one")
    last = seen.last_step
    if last is not None and not last.calls and not last.malformed and not last.truncated and seen.offered_tools:
        written = _WRITTEN_CALL.search(last.text)
        if written and written[1] in seen.offered_tools:
            return _at(last, "format", 0.7, f"a call of {written[1]} in the text, which was not read as one")
        if _WRITTEN_CODE.search(last.text) and seen.offered_tools.keys() & {"python", "python_session", "shell"}:
            return _at(last, "format", 0.6, "code in the text, which no tool was given")
    return None


def format_of_answer(trace: Trace) -> Tag | None:
    """The right answer, not handed in as the task wants it: in the text and not through the tool, or with words around it."""
    seen = timeline_of(trace)
    if seen.truth is None or not seen.steps or seen.last_step is None:
        return None
    if seen.answer is None and seen.stop_reason == "answered" and contains_answer(seen.truth, seen.last_step.text, seen.tolerance):
        return _at(seen.last_step, "format", 0.9, "the answer is in the text, and was not handed in")
    if seen.answer is None or seen.answer == seen.truth:
        return None
    if is_right_answer(seen.answer, seen.truth, seen.tolerance):
        wrong = trace.score is not None and trace.score.value is not None and not is_above(trace.score.value, 0.0)
        return _at(seen.last_step, "format", 0.7, "the right answer in another form, which was not accepted") if wrong else None
    if len(seen.answer) <= 400 and contains_only_answer(seen.truth, seen.answer, seen.tolerance):
        return _at(seen.last_step, "format", 0.8, "the answer holds the right one, and more")
    return None


def wrong_tool(trace: Trace) -> Tag | None:
    """A tool that nobody offered, and nothing that went well after it."""
    seen = timeline_of(trace)
    for place, step in enumerate(seen.steps):
        for call in step.calls:
            strange = seen.offered_tools is not None and call.tool not in seen.offered_tools
            missing = call.failed and _NO_TOOL.search(call.output[:400]) is not None
            if (missing or (strange and call.ok is not True)) and not _went_well(seen, place, step.trajectory):
                return _at(step, "wrong_tool", 0.95 if missing else 0.8, f"there is no tool {call.tool[:64]!r}")
    return None


def bad_arguments(trace: Trace) -> Tag | None:
    """A tool refused its arguments, or failed on them, and no later call to it went well."""
    seen = timeline_of(trace)
    for place, step in enumerate(seen.steps):
        for call in step.calls:
            if _went_well(seen, place, step.trajectory, call.tool):
                continue
            if lacks := _lacking(seen, call):
                return _at(step, "bad_arguments", 0.85, f"{call.tool}: {lacks}")
            if not call.failed or _NO_TOOL.search(call.output[:400]) or _late(call) or (_down(call) and not _blamed(trace, call)):
                continue
            refused = _ARGUMENTS.search(call.output)
            return _at(step, "bad_arguments", 0.9 if refused else 0.7, f"{call.tool}: {_line(call.output, last=not refused)}")
    return None


def misread_output(trace: Trace) -> Tag | None:
    """A tool had given the answer on a line of its own (or in few words), and the agent handed in another."""
    seen = timeline_of(trace)
    if seen.answer is None or not seen.steps or seen.last_step is None:
        return None
    if seen.truth is not None and is_right_answer(seen.answer, seen.truth, seen.tolerance):
        return None
    heard = [call for _, call in _calls(seen) if call.ok is not False and call.tool not in _HANDS_IN and call.output.strip()]
    if seen.truth is not None:
        given = any(is_right_answer(line, seen.truth, seen.tolerance) for call in heard for line in nonblank_lines(call.output))
        short = [call.output for call in heard if len(call.output) <= 500]
        near = len(seen.truth) >= 4 and any(contains_answer(seen.truth, output, 0.0) for output in short)
        near = near or (parse_number(seen.truth) is not None and any(contains_only_answer(seen.truth, output, 0.0) for output in short))
        if given or near:
            return _at(seen.last_step, "misread_output", 0.9 if given else 0.6, "a tool gave the right answer, and another was handed in")
        return None
    final = nonblank_lines(heard[-1].output) if heard else []
    if (
        len(final) == 1
        and parse_number(final[0]) is not None
        and parse_number(seen.answer) is not None
        and not is_right_answer(seen.answer, final[0], 0.0)
    ):
        return _at(seen.last_step, "misread_output", 0.5, "the tool's last output is another number than the answer")
    return None


def looped(trace: Trace) -> Tag | None:
    """The same call with the same outcome three times and nothing new between the last two, or text that repeats itself until the tokens
    run out. Tests that are run again after each change are no loop."""
    seen = timeline_of(trace)
    counts: Counter[tuple[int, int, str]] = Counter()
    second: dict[tuple[int, int, str], tuple[TraceStep, int]] = {}
    news: Counter[int] = Counter()  # trajectory -> calls that told it something new
    for step, call in _calls(seen):
        key = (step.trajectory, call.call_hash, call.output)
        counts[key] += 1
        if counts[key] == 1:
            news[step.trajectory] += 1
        elif key not in second or second[key][1] != news[step.trajectory]:
            second[key], counts[key] = (step, news[step.trajectory]), 2
        elif counts[key] == _REPEATS:
            return _at(second[key][0], "looped", 0.9, f"{call.tool} was called alike {_REPEATS} times or more, and gave the same")
    for step in seen.steps:
        if step.truncated and _repeats_itself(step.text):
            return _at(step, "looped", 0.85, "the text repeats itself until its tokens ran out")
    said = Counter((step.trajectory, step.text.strip()) for step in seen.steps if len(step.text.strip()) >= 20 and not step.calls)
    for (trajectory, words), times in said.items():
        if times >= _REPEATS:
            step = [one for one in seen.steps if one.trajectory == trajectory and one.text.strip() == words][1]
            return _at(step, "looped", 0.8, "the agent said the same three times or more")
    return None


def gave_up(trace: Trace) -> Tag | None:
    """The last turn says that it cannot, or nothing; or what was handed in is no answer."""
    seen = timeline_of(trace)
    step = seen.last_step
    if step is None or seen.hit_limit or step.truncated or step.malformed:
        return None
    if seen.answer is not None and _no_answer(seen.answer) and not _no_answer(seen.truth or "0"):
        return _at(step, "gave_up", 0.85, "what was handed in is no answer")
    if step.calls:
        return None
    if not step.text.strip():
        return _at(step, "gave_up", 0.8, "the agent ended without a word")
    if len(step.text) <= 2000 and _GIVES_UP.search(step.text):
        return _at(step, "gave_up", 0.85, _line(step.text))
    return None


def forbidden_tool(trace: Trace) -> Tag | None:
    """A tool that the task says not to use, or a call that does what it says not to do."""
    seen = timeline_of(trace)
    for forbids, does, told in _DEEDS:
        if forbids.search(f"{seen.instructions}\n{seen.question}"):
            for step, call in _calls(seen):
                if does.search(call.arguments_text):
                    return _at(step, "ignored_instruction", 0.7, f"{call.tool} {told}")
    forbidden = {name.lower() for name in _FORBIDS.findall(f"{seen.instructions}\n{seen.question}")}
    for step, call in _calls(seen):
        if call.tool.lower() in forbidden:
            return _at(step, "ignored_instruction", 0.85, f"the task forbids {call.tool}")
    return None


def ignored_instruction(trace: Trace) -> Tag | None:
    """An answer without a look at the files, one that was not handed in, or words around an answer that was to stand alone."""
    seen = timeline_of(trace)
    if not seen.steps or seen.last_step is None or seen.hit_limit or seen.last_step.truncated or seen.last_step.malformed:
        return None
    looked = any(call.tool not in _HANDS_IN for _, call in _calls(seen))
    others = seen.offered_tools is None or any(name not in _HANDS_IN for name in seen.offered_tools)
    if seen.files and others and not looked and seen.answer is not None and not seen.more_turns:
        return _at(seen.last_step, "ignored_instruction", 0.7, "an answer without a look at the files")
    if (
        seen.answer is None
        and seen.stop_reason == "answered"
        and seen.last_step.text.strip()
        and seen.offered_tools
        and "submit" in seen.offered_tools
    ):
        return _at(seen.last_step, "ignored_instruction", 0.6, "the answer was told, and not handed in")
    if seen.answer is not None and len(seen.answer.split()) > 12 and _ALONE.search(f"{seen.instructions}\n{seen.question}"):
        return _at(seen.last_step, "ignored_instruction", 0.6, "the answer was to stand alone")
    return None


def budget(trace: Trace) -> Tag | None:
    """A limit ended it: turns, tokens, wall time, a tool's time, or the output that an episode may see."""
    seen = timeline_of(trace)
    for place, step in enumerate(seen.steps):
        for call in step.calls:
            if _late(call) and not (_down(call) and not _blamed(trace, call)) and not _went_well(seen, place, step.trajectory):
                return _at(step, "budget", 0.8, f"{call.tool}: {_line(call.output, last=True)}")
            if _USED_UP in call.output:
                return _at(step, "budget", 0.6, _USED_UP)
    if seen.hit_limit and seen.last_step is not None:
        return _at(seen.last_step, "budget", 0.8, seen.stop_reason)
    if seen.hit_limit or trace.why in (CaptureReason.LIMIT, CaptureReason.TIMEOUT):
        return Tag(name="budget", by="rules", confidence=0.8, note=seen.stop_reason or str(trace.why))
    if seen.last_step is not None and seen.last_step.truncated:
        return _at(seen.last_step, "budget", 0.8, "the tokens of a turn ran out")
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
"""In the order in which they win at the same turn."""


def _at(step: TraceStep, name: str, confidence: float, note: str) -> Tag:
    return Tag(name=name, by="rules", confidence=confidence, trajectory=step.trajectory, turn=step.turn, note=note[:400])


def _calls(seen: Timeline) -> Iterator[tuple[TraceStep, TraceCall]]:
    return ((step, call) for step in seen.steps for call in step.calls)


def _down(call: TraceCall) -> bool:
    """Whether a failed call reports an outage of what the tool depends on. Outages in the agent's programs and at addresses that it
    chose do not count."""
    if not call.failed:
        return False
    if _OWN_PROGRAM.search(call.tool) or any(key in call.arguments for key in _PROGRAM_KEYS):
        return _SANDBOX_DOWN.search(call.output) is not None
    if has_address(call.arguments):
        return False
    if outage_phrase(call.output, call.arguments) or is_outage_name(call.error):
        return True
    late = _LATE.search(call.output) is not None and not _JUDGED_LATE.search(call.output)
    return late or any(map(is_outage_name, _TYPE.findall(call.output[:2000])))


def _blamed(trace: Trace, call: TraceCall) -> bool:
    """Whether the run has recorded that the agent provoked the tool's failure."""
    failures = trace.episode.failures if trace.episode is not None else ()
    return any(one.blame is Blame.POLICY and one.stage == "tool" and one.message.startswith(f"tool {call.tool}:") for one in failures)


def _went_well(seen: Timeline, place: int, trajectory: int, tool: str | None = None) -> bool:
    """Whether that agent got over what happened at `place`: a later call of it went well (to that tool, where one is named), and handing
    in is no such call."""
    for step in seen.steps[place + 1 :]:
        if step.trajectory == trajectory:
            for call in step.calls:
                if call.ok and (call.tool not in _HANDS_IN if tool is None else call.tool == tool):
                    return True
    return False


def _no_answer(text: str) -> bool:
    words = text.strip().lower()
    return words.rstrip(".!") in _NOTHING or (len(words) <= _SHORT and _GIVES_UP.search(words) is not None)


def _late(call: TraceCall) -> bool:
    return call.failed and (_LATE.search(call.output) or _LATE.search(call.error)) is not None


def _lacking(seen: Timeline, call: TraceCall) -> str:
    """Which arguments a call lacks by its tool's schema, where there is one and the call did not go well all the same."""
    schema: Any = (seen.offered_tools or {}).get(call.tool)
    required = schema.get("required") if schema and call.ok is not True else None
    if not isinstance(required, list):
        return ""
    absent = [name for name in required[:64] if isinstance(name, str) and name not in call.arguments]
    return f"without {', '.join(absent)}"[:200] if absent else ""


def _repeats_itself(text: str) -> bool:
    """Whether the last part of a text is one piece of up to 60 characters, ten times or more."""
    tail = text[-1200:]
    for size in range(1, min(60, len(tail) // 10) + 1):
        piece = tail[-size:]
        if piece.strip() and tail.endswith(piece * 10):
            return True
    return False


def _line(text: str, *, last: bool = False) -> str:
    """The first line of a text that says something, or the last: that of a traceback is the one."""
    found = nonblank_lines(text)
    return found[-1 if last else 0][:200] if found else ""
