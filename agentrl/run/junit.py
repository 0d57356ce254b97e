"""Evaluations of suites as JUnit XML for CI systems: one test suite per suite, one test case per case.

It contains text from models, tools and verifiers. Characters that XML 1.0 does not allow (section 2.2) become replacement characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as xml

from agentrl.run.outcomes import CaseOutcome, Verdict, details, see_more, short

_NO_XML = re.compile("[^\t\n\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")  # some of them reverse the direction of text


def junit(outcomes: Sequence[CaseOutcome], *, folder: Path, policy: str, at: str = "") -> bytes:
    """Returns the document, with suites in the order of their first case. An unscored case is an error, not a failure.

    Args:
        folder: the run folder, for the commands that show more.
        at: start of the evaluation, ISO 8601.
    """
    root = xml.Element("testsuites", {"name": "agentrl", **_counts(outcomes)})
    for name in dict.fromkeys(one.suite for one in outcomes):
        some = [one for one in outcomes if one.suite == name]
        suite = xml.SubElement(root, "testsuite", {"name": clean(name), **_counts(some), **({"timestamp": clean(at)} if at else {})})
        about = xml.SubElement(suite, "properties")
        xml.SubElement(about, "property", name="policy", value=clean(policy))
        for one in some:
            _add(suite, one, folder)
    xml.indent(root)
    written: bytes = xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


def clean(text: str) -> str:
    """Returns text with only characters that an XML document can contain and that are visible."""
    return _INVISIBLE.sub("\ufffd", _NO_XML.sub("\ufffd", text))


def _add(suite: xml.Element, one: CaseOutcome, folder: Path) -> None:
    case = xml.SubElement(
        suite, "testcase", classname=clean(one.suite), name=clean(one.case.id), time=f"{sum(each.wall_s for each in one.attempts):.3f}"
    )
    if one.verdict is Verdict.PASSED:
        return
    kind = "failure" if one.verdict is Verdict.FAILED else "error"
    tag = one.shown.tag if one.shown is not None and one.shown.tag else str(one.verdict)
    told = xml.SubElement(case, kind, type=clean(tag), message=clean(short(one)))
    tail = ["", one.shown.tail] if one.shown is not None else []
    told.text = clean("\n".join([*details(one), *tail, "", see_more(one, folder)]))


def _counts(outcomes: Sequence[CaseOutcome]) -> dict[str, str]:
    verdicts = [one.verdict for one in outcomes]
    spent = sum(each.wall_s for one in outcomes for each in one.attempts)
    return {
        "tests": str(len(verdicts)),
        "failures": str(verdicts.count(Verdict.FAILED)),
        "errors": str(verdicts.count(Verdict.UNSCORED)),
        "skipped": "0",
        "time": f"{spent:.3f}",
    }
