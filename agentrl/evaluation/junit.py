"""Evaluations of suites as JUnit XML for CI systems: one test suite per suite, one test case per case.

It contains text from models, tools and verifiers. Characters that XML 1.0 does not allow (section 2.2) become replacement characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as xml

from agentrl.evaluation.outcomes import CaseOutcome, CaseStatus, detail_lines, show_command, summary_line

_NO_XML = re.compile("[^\t\n\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")  # some of them reverse the direction of text


def junit_xml(outcomes: Sequence[CaseOutcome], *, folder: Path, policy: str, at: str = "") -> bytes:
    """Returns the document, with suites in the order of their first case. An unscored case is an error, not a failure.

    Args:
        folder: the run folder, for the commands that show more.
        at: start of the evaluation, ISO 8601.
    """
    root = xml.Element("testsuites", {"name": "agentrl", **_counts(outcomes)})
    for name in dict.fromkeys(one.suite for one in outcomes):
        cases = [one for one in outcomes if one.suite == name]
        suite = xml.SubElement(root, "testsuite", {"name": xml_text(name), **_counts(cases), **({"timestamp": xml_text(at)} if at else {})})
        about = xml.SubElement(suite, "properties")
        xml.SubElement(about, "property", name="policy", value=xml_text(policy))
        for one in cases:
            _add(suite, one, folder)
    xml.indent(root)
    written: bytes = xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


def xml_text(text: str) -> str:
    """Returns text with only characters that an XML document can contain and that are visible."""
    return _INVISIBLE.sub("\ufffd", _NO_XML.sub("\ufffd", text))


def _add(suite: xml.Element, one: CaseOutcome, folder: Path) -> None:
    case = xml.SubElement(
        suite,
        "testcase",
        classname=xml_text(one.suite),
        name=xml_text(one.case.id),
        time=f"{sum(each.wall_s for each in one.attempts):.3f}",
    )
    if one.status is CaseStatus.PASSED:
        return
    kind = "failure" if one.status is CaseStatus.FAILED else "error"
    tag = one.example.tag if one.example is not None and one.example.tag else str(one.status)
    element = xml.SubElement(case, kind, type=xml_text(tag), message=xml_text(summary_line(one)))
    tail = ["", one.example.tail] if one.example is not None else []
    element.text = xml_text("\n".join([*detail_lines(one), *tail, "", show_command(one, folder)]))


def _counts(outcomes: Sequence[CaseOutcome]) -> dict[str, str]:
    verdicts = [one.status for one in outcomes]
    spent = sum(each.wall_s for one in outcomes for each in one.attempts)
    return {
        "tests": str(len(verdicts)),
        "failures": str(verdicts.count(CaseStatus.FAILED)),
        "errors": str(verdicts.count(CaseStatus.UNSCORED)),
        "skipped": "0",
        "time": f"{spent:.3f}",
    }
