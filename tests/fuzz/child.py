"""The process that feeds one target, with libFuzzer through atheris, up to a number of inputs or seconds, or the first finding.

It reports to its parent (`tests.fuzz.run`) on stderr, in lines that begin with `MARK`, among libFuzzer's own output.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from tests.fuzz import mutators
from tests.fuzz.catalog import find
from tests.fuzz.target import Check, Target

MARK = "agentrl-fuzz "
BOOT = """
import json, sys, atheris
with atheris.instrument_imports(include=json.loads(sys.argv[2])):
    from tests.fuzz.child import main
    main(sys.argv[1])
"""
"""The program of the process. Modules imported by it report which branches an input takes."""
READERS = ("agentrl", "tomllib")

FOUND = 77  # exit status
SLOW_S = 1.0
"""CPU seconds that one input may take if `_fixed_work` takes at most `PACE_S`, and proportionally more if it takes longer.

Linear work on `mutators.LARGEST` bytes takes a hundredth of that, Python's own parser a quarter.
"""
PACE_S = 0.08  # on a quiet machine, reporting its branches
TRIES = 4
HANG_S = 60
"""Seconds after which an input that has not ended is a finding, unless the job says otherwise."""
MEMORY_MB = 4096
USUAL_BYTES = 4096  # size up to which libFuzzer's own mutations grow inputs
REPORT_EVERY_S = 0.5
SHRINK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The work of one process."""

    target: str  # name or reference
    inputs: int  # 0: no limit
    seconds: int  # 0: no limit
    corpus: str
    findings: str
    scratch: str
    hang_s: int
    seed: int  # of all randomness; 0: different each time


class Slow(Exception):
    """An input took more CPU time than linear work can."""


def main(text: str) -> None:
    """Runs the `Job` given as JSON. Does not return."""
    job = Job(**json.loads(text))
    logging.disable()
    warnings.simplefilter("ignore")
    target = find(job.target)
    feeding = Feeding(target, target.prepare(Path(job.scratch)), Path(job.findings))
    for number, seed in enumerate(target.seeds()):
        (Path(job.corpus) / f"seed-{number}").write_bytes(seed)
    options = _options(job, target)

    import atheris

    # atheris.Mutate is looked up at each call, since it is replaced when fuzzing begins
    atheris.Setup(
        [target.name, *options, job.corpus], feeding, custom_mutator=mutator(target, lambda data, max_size: atheris.Mutate(data, max_size))
    )
    atheris.Fuzz()


def _options(job: Job, target: Target) -> list[str]:
    """libFuzzer's options (https://llvm.org/docs/LibFuzzer.html#options)."""
    options = [f"-runs={job.inputs or -1}", f"-max_total_time={job.seconds}", f"-timeout={job.hang_s}"]
    options += [f"-artifact_prefix={job.findings}/{target.name}-", f"-max_len={mutators.LARGEST}", f"-rss_limit_mb={MEMORY_MB}"]
    options += [f"-seed={job.seed}", "-print_final_stats=1", "-reload=0", "-keep_seed=1"]
    if target.words:
        words = Path(job.scratch).parent / "words"
        words.write_text("".join(f'"{_quoted(word)}"\n' for word in target.words))
        options.append(f"-dict={words}")
    return options


def mutator(target: Target, native: Callable[[bytes, int], bytes]) -> Callable[[bytes, int, int], bytes]:
    """The custom mutator for libFuzzer: half of the time that of the target, rarely one that grows inputs, else libFuzzer's."""

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        chance = Random(seed)
        draw = chance.random()
        if len(data) > 2 * USUAL_BYTES:
            data = data[: chance.randrange(USUAL_BYTES)]
        if draw < 0.01:
            return mutators.swell(data, chance)[:max_size]
        if target.mutate is None or draw < 0.5:
            return native(data, min(max_size, USUAL_BYTES))
        return target.mutate(data, chance)[:max_size]

    return mutate


class Feeding:
    """Feeds inputs to a check, counts them, and ends the process at the first finding."""

    def __init__(self, target: Target, check: Check, findings: Path) -> None:
        self.target, self.check, self.findings = target, check, findings
        self.inputs = 0
        self.last_report = time.monotonic()

    def __call__(self, data: bytes) -> None:
        self.inputs += 1
        if (error := attempt(self.check, data)) is not None:
            self._end_with(data, error)
        if not self.inputs & 63 and time.monotonic() - self.last_report > REPORT_EVERY_S:
            self.last_report = time.monotonic()
            report(inputs=self.inputs)

    def _end_with(self, data: bytes, error: BaseException) -> None:
        small, error = shrunk(self.check, data, error)
        path = self.findings / f"{self.target.name}-{hashlib.sha256(small).hexdigest()[:12]}"
        path.write_bytes(small)
        trace = "".join(traceback.format_exception(error))
        report(inputs=self.inputs, finding=str(path), error=f"{type(error).__name__}: {error}"[:500], trace=trace[-6000:])
        os._exit(FOUND)


def attempt(check: Check, data: bytes) -> BaseException | None:
    """Feeds one input. Returns the exception of the check, `Slow`, or None if the input is no finding.

    A slow input is fed again and compared with a fixed amount of work, so that a busy or slow machine does not cause a finding.
    """
    took = pace = math.inf
    for _ in range(TRIES):
        started = time.process_time()
        try:
            check(data)
        except BaseException as error:
            return error
        took = min(took, time.process_time() - started)
        if took <= SLOW_S:
            return None
        pace = min(pace, _fixed_work())
        if took <= SLOW_S * max(1.0, pace / PACE_S):
            return None
    return Slow(f"{len(data)} bytes took {took:.1f} s of CPU time")


def _fixed_work() -> float:
    """CPU seconds of linear work over a text, as parsers do it."""
    text = "key = [1, 2]\n" * 10_000
    started = time.process_time()
    at = 0
    for character in text:
        if character == "\n":
            at += 1
        elif character.isspace():
            at -= 1
    return time.process_time() - started


def shrunk(check: Check, data: bytes, error: BaseException) -> tuple[bytes, BaseException]:
    """Returns the smallest input found within `SHRINK_S` that fails in the same way."""
    deadline = time.monotonic() + SHRINK_S
    size = len(data) // 2
    while size:
        at = 0
        while at < len(data):
            if time.monotonic() > deadline:
                return data, error
            smaller = data[:at] + data[at + size :]
            failure = attempt(check, smaller)
            if failure is not None and _alike(failure, error):
                data, error = smaller, failure
            else:
                at += size
        size //= 2
    return data, error


def _alike(first: BaseException, second: BaseException) -> bool:
    locations = [[(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)[-1:]] for error in (first, second)]
    return type(first) is type(second) and locations[0] == locations[1]


def report(**fields: object) -> None:
    """Sends a line to the parent. Ends this process if the parent has ended."""
    try:
        os.write(2, f"{MARK}{json.dumps(fields)}\n".encode())
    except OSError:
        os._exit(1)


def command(job: Job) -> list[str]:
    """The command that starts a job's process."""
    return [sys.executable, "-c", BOOT, json.dumps(asdict(job)), json.dumps([*READERS, *own_modules(Path.cwd())])]


def own_modules(root: Path) -> list[str]:
    """Top-level names of a project's own modules, whose branches guide the inputs too."""
    names = {path.name.removesuffix(".py") for path in root.iterdir() if path.is_dir() or path.suffix == ".py"}
    return sorted(name for name in names if name.isidentifier())


def _quoted(word: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in word)
