"""The cells of the matrix: installed environments, stored results that an interrupted command continues from, and the table."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.base.files import write_atomically
from benchmarks import stored
from benchmarks.outside.program import COLUMNS, Program, Way
from benchmarks.outside.session import Exchange

RESULT = "outside-programs"
CODE = ("agentrl/gateway", "agentrl/agent", "benchmarks/outside/session.py")
"""The code that every cell measures."""

PAGE = stored.ROOT / "docs" / "bring-your-own-agent.md"
BEGIN = "<!-- made by benchmarks/outside_programs.py --markdown: begin -->"
END = "<!-- made by benchmarks/outside_programs.py --markdown: end -->"
SHOWN = re.compile(
    r"stop|stop_sequences|strict|parallel_tool_calls=False|previous_response_id|context_management|tool_choice=(?!auto)\w+"
    r"|(response_format|text|output_config)=json\w*|thinking=(enabled|adaptive)"
)
"""Options that the table shows: those that change the answer."""

_HEADS = ("chat completions", "streamed", "Responses", "streamed", "Messages", "streamed")


def installed(program: Program, programs: Mapping[str, Program], work: Path) -> Path:
    """The folder of a program's environment. Installs it the first time."""
    folder = work / "environments" / program.environment
    source = programs[program.environment]
    marker, packages = folder / "installed", json.dumps(source.install(Path())[1:])
    if not marker.exists() or marker.read_text() != packages:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"installing {source.version} into {folder}", file=sys.stderr)
        subprocess.run(source.install(folder), check=True, stdout=sys.stderr)
        marker.write_text(packages)
    return folder


def cell_path(program: Program, way: Way, work: Path) -> Path:
    return work / "cells" / f"{program.name}.{way.column}.json"


def measured_code(program: Program, way: Way) -> dict[str, str]:
    """Returns hashes of what a cell depends on: the code, and how the program is run. A cell with other hashes is measured again."""
    script = [inspect.getsource(program.says), *program.install(Path())[1:], program.prints, *program.models]
    script += [*way.command, *sorted(f"{name}={value}" for name, value in way.environment.items())]
    files = [file.read_text() for _, file in sorted(way.files.items())]
    total = hashlib.sha256(json.dumps([program.version, script, files]).encode()).hexdigest()[:16]
    return {**{path: stored.digest(path) for path in CODE}, "way": total}


def stored_cell(program: Program, way: Way, work: Path) -> dict[str, Any] | None:
    """Returns the cell of an earlier command; None if its `measured_code` differs."""
    path = cell_path(program, way, work)
    if not path.exists():
        return None
    cell: dict[str, Any] = json.loads(path.read_text())
    return cell if cell["code"] == measured_code(program, way) else None


def keep_cell(cell: Mapping[str, Any], requests: Sequence[Exchange], path: Path) -> None:
    """Writes a cell, and next to it the bodies of its requests, one JSON line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    bodies = [{"path": route, "status": status, "body": body.decode("utf-8", "replace")} for _, route, body, status, _ in requests]
    write_atomically(path.with_suffix(".requests.jsonl"), "".join(json.dumps(body) + "\n" for body in bodies))
    write_atomically(path, json.dumps(cell, indent=1) + "\n")


def keep_matrix(command: str, cells: Sequence[Mapping[str, Any]]) -> Path:
    """Writes docs/results/outside-programs.json."""
    hidden = ("output", "code", "failures")
    return stored.keep(
        RESULT,
        stored.origin(command, (*CODE, "benchmarks/outside")),
        cells=[{key: value for key, value in cell.items() if key not in hidden} for cell in cells],
    )


def table(cells: Iterable[Mapping[str, Any]], programs: Mapping[str, Program]) -> str:
    """Returns the matrix in Markdown, and below it the reasons of the cells that are not OK."""
    by_program: dict[str, dict[str, Mapping[str, Any]]] = {}
    for cell in cells:
        by_program.setdefault(cell["program"], {})[cell["column"]] = cell
    lines = [f"| program | {' | '.join(_HEADS)} | uses |", f"| --- |{' --- |' * (len(_HEADS) + 1)}"]
    notes: list[str] = []  # each reason once
    for name, row in by_program.items():
        program = programs[name]
        shown = [_shown(row.get(column), program.absent.get(column, ""), notes) for column in COLUMNS]
        options = sorted({option for cell in row.values() for option in cell["options"] if SHOWN.fullmatch(option)})
        about = ", ".join(filter(None, (program.features, *(f"`{option}`" for option in options))))
        lines.append(f"| {program.version} | {' | '.join(shown)} | {about} |")
    return "\n".join([*lines, *(["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))] if notes else [])])


def _shown(cell: Mapping[str, Any] | None, absent: str, notes: list[str]) -> str:
    reason = absent if cell is None else cell["reason"]
    if cell is not None and not reason:
        return "OK"
    if not reason:
        return "-"
    note = " ".join(reason.split())[:300].replace("|", "\\|")
    if note not in notes:
        notes.append(note)
    return f"{'-' if cell is None else 'no'} ({notes.index(note) + 1})"


def write_page(programs: Mapping[str, Program]) -> None:
    """Writes the table of the stored matrix into the page."""
    result = json.loads((stored.RESULTS / f"{RESULT}.json").read_text())
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    write_atomically(PAGE, f"{before}{BEGIN}\n\n{table(result['cells'], programs)}\n\n{END}{after}")
