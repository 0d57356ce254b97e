"""Third-party agent programs, unchanged, each on a small repair task through the gateway, in a bubblewrap sandbox.

    python benchmarks/outside_programs.py --all --work runs/programs
    python benchmarks/outside_programs.py codex pydantic-ai:messages-streamed --work runs/programs
    python benchmarks/outside_programs.py --markdown

A cell of the matrix is one session of a program with one protocol, streamed or not. The policy is a script that answers as a competent
model would: it looks at the files, repairs the broken one, runs the test and ends. A cell is OK if the program ends with status 0, the
task's test passes in the sandbox, and every sampled token is in exactly one training sample, after the ids that the policy was shown.

Each program is installed into its own folder below `--work`, at an exact version from the package index (pip) or npm. `--work` also holds
the cells (`cells/NAME.json`, with the program's output, and the bodies of its requests). A stored cell of the same version and code is
not run again, so an interrupted command continues. `--all` writes docs/results/outside-programs.json, and `--markdown` writes its table
into docs/bring-your-own-agent.md. The exit status is 1 if a cell is not OK.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.outside import cli, matrix, sdk
from benchmarks.outside.program import Program, Way
from benchmarks.outside.session import run_session

PROGRAMS = {program.name: program for program in (*cli.PROGRAMS, *sdk.PROGRAMS)}


def chosen(names: Sequence[str]) -> list[tuple[Program, Way]]:
    """The cells of names such as `codex` and `pydantic-ai:chat-streamed`; without names all."""
    cells = []
    for name in names or PROGRAMS:
        program, _, column = name.partition(":")
        if program not in PROGRAMS:
            raise SystemExit(f"unknown program {program!r}; choose from: {', '.join(PROGRAMS)}")
        ways = [way for way in PROGRAMS[program].ways if column in ("", way.column)]
        if not ways:
            raise SystemExit(f"{program} has no column {column!r}; choose from: {', '.join(way.column for way in PROGRAMS[program].ways)}")
        cells += [(PROGRAMS[program], way) for way in ways]
    return cells


def measure(cells: Sequence[tuple[Program, Way]], work: Path, *, port: int, wall_s: float) -> list[dict[str, Any]]:
    """Runs the cells that have no stored result, and prints each."""
    results = []
    for number, (program, way) in enumerate(cells, 1):
        cell = matrix.stored_cell(program, way, work)
        if cell is None:
            folder = matrix.installed(program, PROGRAMS, work)
            measured, requests = run_session(program, way, folder, port=port, wall_s=wall_s)
            cell = {**measured, "code": matrix.measured_code(program, way)}
            matrix.keep_cell(cell, requests, matrix.cell_path(program, way, work))
        results.append(cell)
        print(f"{number}/{len(cells)} {program.name} {way.column}: {cell['reason'] or 'OK'} ({cell['wall_s']} s)", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("programs", nargs="*", metavar="NAME[:COLUMN]", help=f"programs: {', '.join(PROGRAMS)}")
    parser.add_argument("--all", action="store_true", help="run all cells and write docs/results/outside-programs.json")
    parser.add_argument("--work", type=Path, default=Path("runs/outside_programs"), help="folder of environments and cells")
    parser.add_argument("--port", type=int, default=8795, help="port of the gateway")
    parser.add_argument("--wall-s", type=float, default=180.0, help="time limit of a session in seconds")
    parser.add_argument("--markdown", action="store_true", help="write the table of the stored result into docs/bring-your-own-agent.md")
    args = parser.parse_args()
    if not (args.programs or args.all or args.markdown) or (args.programs and args.all):
        parser.error("specify programs, --all or --markdown")
    failed = False
    if args.programs or args.all:
        if shutil.which("bwrap") is None:
            print("bubblewrap is not installed; run apt-get install bubblewrap", file=sys.stderr)
            return 2
        cells = measure(chosen(args.programs), args.work, port=args.port, wall_s=args.wall_s)
        failed = any(cell["reason"] for cell in cells)
        if args.all:
            matrix.keep_matrix(f"python benchmarks/outside_programs.py --all --work {args.work}", cells)
    if args.markdown:
        matrix.write_page(PROGRAMS)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
