"""Mutation tests of the laws: inserts small defects into the code of each law and reports every defect that no test detects.

    python scripts/mutants.py                      all laws, two at a time; continues where an earlier call stopped
    python scripts/mutants.py objective swap       only these laws
    python scripts/mutants.py --file agentrl/serving/swap.py --line 120
    python scripts/mutants.py --list               the laws, their files and the number of defects in each

A defect (mutant) changes one operator, number, condition or call. The tests of its law that execute the changed line run on it, the
fastest first, until one fails. A mutant survives if none fails. The exit code is 1 if `tests/mutants.toml` does not explain a survivor.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXPLAINED = ROOT / "tests" / "mutants.toml"
CACHE = ROOT / "build" / "mutants.json"
WORKER = Path(__file__).with_name("mutant_worker.py")
BASELINE_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The files that implement a law, and the tests (files or folders) that must detect defects in them."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


LAWS = {
    "objective": Law(
        files=(
            "agentrl/objective/advantages.py",
            "agentrl/objective/losses.py",
            "agentrl/objective/branches.py",
            "agentrl/objective/credit.py",
            "agentrl/objective/policy_loss.py",
            "agentrl/objective/samples.py",
            "agentrl/objective/values.py",
        ),
        tests=("tests/objective",),
    ),
    "masks": Law(files=("agentrl/objective/samples.py", "agentrl/objective/values.py"), tests=("tests/objective",)),
    "store": Law(
        files=("agentrl/experience/store.py", "agentrl/experience/checkpoints.py", "agentrl/experience/ledger.py"),
        tests=("tests/experience",),
    ),
    "swap": Law(
        files=("agentrl/serving/swap.py", "agentrl/serving/probe.py", "agentrl/serving/weight_state.py"),
        tests=(
            "tests/serving/test_swap.py",
            "tests/serving/test_supervisor.py",
            "tests/serving/test_probed_starts.py",
            "tests/serving/test_client.py",
        ),
    ),
    "gate": Law(
        files=(
            "agentrl/gate/rule.py",
            "agentrl/evaluation/statistics.py",
            "agentrl/gate/gate.py",
            "agentrl/gate/schedule.py",
            "agentrl/gate/verdict.py",
        ),
        tests=(
            "tests/gate/test_rule.py",
            "tests/evaluation/test_statistics.py",
            "tests/gate/test_gate.py",
            "tests/gate/test_gate_judgements.py",
            "tests/gate/test_schedule.py",
        ),
    ),
    "blame": Law(
        files=(
            "agentrl/rollout/episode.py",
            "agentrl/rollout/faults.py",
            "agentrl/rollout/pace.py",
            "agentrl/rollout/requests.py",
            "agentrl/agent/outage_blame.py",
            "agentrl/base/outages.py",
            "agentrl/reward/scorer.py",
            "agentrl/failure/faults.py",
            "agentrl/base/error_text.py",
        ),
        tests=(
            "tests/rollout",
            "tests/base/test_outages.py",
            "tests/agent/test_outage_blame.py",
            "tests/reward/test_combine.py",
            "tests/reward/test_scorer.py",
            "tests/reward/test_verifier_call.py",
            "tests/failure/test_rate.py",
            "tests/base/test_error_text.py",
        ),
    ),
    "liveness": Law(files=("agentrl/base/liveness.py",), tests=("tests/base/test_liveness.py",)),
    "values": Law(
        files=("agentrl/base/numbers.py",),
        tests=("tests/base/test_numbers.py", "tests/rewards/test_whole_numbers.py", "tests/base/test_scores.py"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    file: str
    line: int  # counted from 1
    code: str  # the first line of the statement that is changed, stripped
    before: str
    after: str
    source: str  # the whole file with the change
    lines: tuple[int, int]  # of the statement

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


# Creation of mutants ------------------------------------------------------------------------------------------------------------------

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SILENT = ("log", "warnings")  # their calls print text and have no other effect


def changes(node: ast.AST) -> Iterator[ast.AST | str]:
    """The nodes (or statements, as text) that replace `node`, each of them one defect."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield ast.Compare(left=node.left, ops=[COMPARISONS[type(op)]()], comparators=node.comparators)
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                if type(op) in COMPARISONS:
                    yield ast.Compare(
                        left=node.left, ops=[*ops[:index], COMPARISONS[type(op)](), *ops[index + 1 :]], comparators=node.comparators
                    )
        case ast.BinOp() if type(node.op) in OPERATORS and not _is_text(node.left) and not _is_text(node.right):
            yield ast.BinOp(left=node.left, op=OPERATORS[type(node.op)](), right=node.right)
        case ast.BoolOp():
            yield ast.BoolOp(op=ast.Or() if isinstance(node.op, ast.And) else ast.And(), values=node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.IfExp():
            yield ast.IfExp(test=node.test, body=node.orelse, orelse=node.body)
        case ast.Constant(value=bool() as value):
            yield ast.Constant(value=not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value=value + 1)
        case ast.Constant(value=float() as value):
            yield from (ast.Constant(value=other) for other in {value * 100, value / 100, value or 1.0} - {value})
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield ast.Call(func=ast.Name(id=NAMES[name]), args=node.args, keywords=node.keywords)
        case ast.Call(func=ast.Name(id="abs"), args=[inner]):
            yield inner
        case ast.If(test=test) if not isinstance(test, ast.Compare | ast.BoolOp) and not _is_not(test):
            changed = copy.copy(node)
            changed.test = ast.UnaryOp(op=ast.Not(), operand=test)
            yield changed.test
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield f"{ast.unparse(node.target)} {_symbol(OPERATORS[type(op)])}= {ast.unparse(node.value)}"
        case ast.Raise() | ast.Expr(value=ast.Call() | ast.Await()):
            yield "pass"
        case ast.Continue():
            yield "break"
        case ast.Break():
            yield "continue"


def mutants(file: str, source: str) -> list[Mutant]:
    """Returns all mutants of a file, in the order of its lines."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines()
    defects = []
    for node, statement in _candidates(ast.parse(source), None):
        for change in changes(node):
            target: Any = node.test if isinstance(node, ast.If) else node
            begin, end = starts[target.lineno - 1] + target.col_offset, starts[target.end_lineno - 1] + target.end_col_offset
            text = change if isinstance(change, str) else f"({ast.unparse(ast.fix_missing_locations(change))})"
            defects.append(
                Mutant(
                    file=file,
                    line=target.lineno,
                    code=lines[target.lineno - 1].strip(),
                    before=" ".join(data[begin:end].decode().split()),
                    after=text.removeprefix("(").removesuffix(")") if not isinstance(change, str) else text,
                    source=(data[:begin] + text.encode() + data[end:]).decode(),
                    lines=(statement.lineno, statement.end_lineno or statement.lineno),
                )
            )
    return sorted(defects, key=lambda mutant: mutant.line)


def _candidates(node: ast.AST, statement: Any) -> Iterator[tuple[ast.AST, Any]]:
    """Nodes whose change could matter, each with its statement.

    Annotations, decorators, messages, log calls and assertions are excluded. `strict=` of `zip` is an assertion.
    """
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "exc", "cause", "type_params", "msg"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Assert) or _is_silent(child) or _is_strict(child):
                continue
            within = child if isinstance(child, ast.stmt) else statement
            if within is not None:
                yield child, _head(within)
            yield from _candidates(child, within)


def _head(statement: Any) -> Any:
    """The part of a compound statement that is executed with its own condition."""
    for name in ("test", "iter", "subject"):
        if hasattr(statement, name):
            return getattr(statement, name)
    return statement


def _is_silent(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    call = node.value if isinstance(node, ast.Expr) else node
    while isinstance(call, ast.Call | ast.Attribute):
        call = call.func if isinstance(call, ast.Call) else call.value
    return isinstance(node, ast.Expr) and isinstance(call, ast.Name) and call.id in SILENT


def _is_strict(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _symbol(operator: type[ast.operator]) -> str:
    return ast.unparse(ast.BinOp(left=ast.Name("a"), op=operator(), right=ast.Name("b")))[2:-2]


# Running mutants --------------------------------------------------------------------------------------------------------------------


class Tree:
    """A copy of the working tree, and a process in it that has imported what tests import and forks for each mutant."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        ).stdout.decode()
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, str(WORKER)], cwd=folder, env=env, start_new_session=True, **pipes)

    def ask(self, **request: object) -> Any:
        """The worker's answer to one request; see `mutant_worker.py`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the worker in {self.folder} ended (exit code {self._process.wait()})")
        return json.loads(answer)

    def killed(self, mutant: Mutant, tests: Sequence[str], limit_s: float) -> str | None:
        """The test that detects the mutant ("" if it ran out of time), or None if all pass."""
        path = self.folder / mutant.file
        original = path.read_text()
        path.write_text(mutant.source)
        try:
            answer = self.ask(do="run", tests=list(tests), limit_s=limit_s)
            return None if answer["passed"] else str(answer["killer"])
        finally:
            path.write_text(original)

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def covering(coverage: Any, mutant: Mutant) -> tuple[list[str], float]:
    """The tests that execute the changed statement, fastest first, and their seconds. At import: all tests that execute the file."""
    per_line: dict[str, list[str]] = coverage["lines"].get(mutant.file, {})
    hit = {test for line in range(mutant.lines[0], mutant.lines[1] + 1) for test in per_line.get(str(line), ())}
    if not hit and mutant.lines[0] in coverage["imported"].get(mutant.file, ()):
        hit = {test for tests in per_line.values() for test in tests}
    seconds = coverage["seconds"]
    chosen = sorted(hit, key=lambda test: (seconds[test], test))
    return chosen, sum(seconds[test] for test in chosen)


def explained() -> dict[tuple[str, str, str, str], str]:
    """Mutants that no test can detect, with the reason: (file, line of code, before, after) -> reason."""
    listed = tomllib.loads(EXPLAINED.read_text()).get("equivalent", []) if EXPLAINED.exists() else []
    return {(entry["file"], entry["code"], entry["before"], entry["after"]): entry["reason"] for entry in listed}


class Session:
    """The mutants of a call, their results, and stored results of earlier calls for the same files and tests."""

    def __init__(self, jobs: int) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.trees = [Tree(self.scratch / str(index)) for index in range(jobs)]
        stored = json.loads(CACHE.read_text()) if CACHE.exists() else {}
        self.known: dict[str, bool] = stored.get("survived", {})
        self.killers: dict[str, str] = stored.get("killers", {})  # tried first, also after tests have changed
        self.lock = threading.Lock()

    def close(self) -> None:
        for tree in self.trees:
            tree.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.save()

    def save(self) -> None:
        CACHE.parent.mkdir(exist_ok=True)
        CACHE.write_text(json.dumps({"survived": self.known, "killers": self.killers}))

    def survivors(self, name: str, law: Law, chosen: Sequence[Mutant]) -> list[tuple[Mutant, str]]:
        """The mutants that no test detects, each with whether any test executes it."""
        tests_hash = _hash(*(path.read_text() for path in _test_files(law)))
        todo: queue.Queue[tuple[Mutant, str]] = queue.Queue()
        keys = {id(mutant): _hash(mutant.source, tests_hash) for mutant in chosen}
        alive: list[tuple[Mutant, str]] = []
        for mutant in chosen:
            if self.known.get(keys[id(mutant)]) is not False:
                todo.put((mutant, keys[id(mutant)]))
        if todo.empty():
            return alive
        print(f"{name}: {len(chosen)} mutants, {todo.qsize()} to test; first runs the tests without a mutant", file=sys.stderr, flush=True)
        coverage = self.trees[0].ask(do="cover", tests=list(law.tests), files=list(law.files), limit_s=BASELINE_LIMIT_S)
        if coverage["failed"]:
            raise SystemExit(f"{name}: these tests fail without a mutant: {', '.join(coverage['failed'][:5])}")
        began, total = time.monotonic(), todo.qsize()

        def work(tree: Tree) -> None:
            while True:
                try:
                    mutant, key = todo.get_nowait()
                except queue.Empty:
                    return
                tests, seconds = covering(coverage, mutant)
                tests.sort(key=lambda test: test != self.killers.get(_hash(mutant.source)))
                killer = tree.killed(mutant, tests, 20 + 5 * seconds) if tests else None
                with self.lock:
                    self.known[key] = killer is None
                    if killer is not None:
                        self.killers[_hash(mutant.source)] = killer
                    else:
                        alive.append((mutant, "" if tests else " (no test executes it)"))
                        print(f"{name}: survives: {mutant.name}{alive[-1][1]}", file=sys.stderr, flush=True)
                    done = total - todo.qsize()
                    if done % 25 == 0 or done == total:
                        remaining_s = (time.monotonic() - began) / done * (total - done)
                        print(f"{name}: {done}/{total}, {len(alive)} survive, {remaining_s / 60:.0f} min left", file=sys.stderr, flush=True)
                        self.save()

        threads = [threading.Thread(target=work, args=(tree,)) for tree in self.trees]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(alive, key=lambda pair: (pair[0].file, pair[0].line))


def _test_files(law: Law) -> list[Path]:
    paths = [ROOT / name for name in law.tests]
    return sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("laws", nargs="*", metavar="LAW", help=f"laws to test; default: all of {', '.join(LAWS)}")
    parser.add_argument("--file", help="test only the mutants of this file")
    parser.add_argument("--line", type=int, help="test only the mutants of this line")
    parser.add_argument("--jobs", type=int, default=2, help="mutants to test concurrently (default 2)")
    parser.add_argument("--list", action="store_true", help="print the laws with their files and counts; run nothing")
    args = parser.parse_args()
    if unknown := [name for name in args.laws if name not in LAWS]:
        parser.error(f"unknown law {unknown[0]!r}; choose from: {', '.join(LAWS)}")
    laws = {name: LAWS[name] for name in args.laws or LAWS}
    chosen = {
        name: [
            mutant
            for file in law.files
            if args.file in (None, file)
            for mutant in mutants(file, (ROOT / file).read_text())
            if args.line in (None, mutant.line)
        ]
        for name, law in laws.items()
    }
    if args.list:
        for name, law in laws.items():
            counts = Counter(mutant.file for mutant in chosen[name])
            print(f"{name} ({', '.join(law.tests)})", *(f"  {file}: {counts[file]}" for file in law.files), sep="\n")
        return 0
    reasons, used, bad = explained(), set(), 0
    session = Session(args.jobs)
    try:
        for name, law in laws.items():
            if not chosen[name]:
                continue
            alive = session.survivors(name, law, chosen[name])
            for mutant, note in alive:
                key = (mutant.file, mutant.code, mutant.before, mutant.after)
                used.add(key)
                if key not in reasons:
                    bad += 1
                    print(f"{mutant.name}{note}", flush=True)
            same = sum((mutant.file, mutant.code, mutant.before, mutant.after) in reasons for mutant, _ in alive)
            print(
                f"{name}: {len(chosen[name])} mutants, {len(alive) - same} survive, {same} have no detectable effect",
                flush=True,
            )
    finally:
        session.close()
    unrestricted = not args.file and not args.line
    for key in reasons:
        if unrestricted and key not in used and key[0] in {file for law in laws.values() for file in law.files}:
            bad += 1
            print(f"{EXPLAINED.relative_to(ROOT)} explains a mutant that a test detects or that does not exist: {key}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
