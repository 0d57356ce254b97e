"""The process in which one target is fed: libFuzzer through atheris, until a number of inputs or seconds is over, or something is found.

It tells its parent (`agentrl.fuzzing.run`) on stderr, among what libFuzzer prints, in lines that begin with `MARK`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from agentrl.fuzzing import mutators
from agentrl.fuzzing.catalog import find
from agentrl.fuzzing.target import Check, Target

MARK = "agentrl-fuzz "
BOOT = """
import json, sys, atheris
with atheris.instrument_imports(include=json.loads(sys.argv[2])):
    from agentrl.fuzzing.child import main
    main(sys.argv[1])
"""
"""What the process runs: modules that are imported from here on report which branches an input takes."""
READERS = ("agentrl", "tomllib")

FOUND = 77  # exit status
SLOW_S = 1.0
"""Processor seconds that one input may take: linear work on `mutators.LARGEST` bytes takes a hundredth of that."""
HANG_S = 60
"""Seconds after which an input that does not come to an end is a finding, unless a job says otherwise."""
MEMORY_MB = 4096
USUAL_BYTES = 4096  # what libFuzzer's own mutations grow inputs to
TELL_S = 0.5
SHRINK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process does."""

    target: str  # name or reference
    inputs: int  # 0: no limit
    seconds: int  # 0: no limit
    corpus: str
    findings: str
    scratch: str
    hang_s: int
    seed: int  # of every draw; 0: another one each time


class Slow(Exception):
    """An input took more processor time than linear work can."""


def main(text: str) -> None:
    """Does the `Job` that is given as JSON. Does not return."""
    job = Job(**json.loads(text))
    logging.disable()
    warnings.simplefilter("ignore")
    target = find(job.target)
    feeding = Feeding(target, target.prepare(Path(job.scratch)), Path(job.findings))
    for number, seed in enumerate(target.seeds()):
        (Path(job.corpus) / f"seed-{number}").write_bytes(seed)
    options = _options(job, target)

    import atheris

    # atheris.Mutate is looked up at each call: it becomes another function when fuzzing begins
    atheris.Setup(
        [target.name, *options, job.corpus], feeding, custom_mutator=mutator(target, lambda data, most: atheris.Mutate(data, most))
    )
    atheris.Fuzz()


def _options(job: Job, target: Target) -> list[str]:
    """What libFuzzer is told (https://llvm.org/docs/LibFuzzer.html#options)."""
    options = [f"-runs={job.inputs or -1}", f"-max_total_time={job.seconds}", f"-timeout={job.hang_s}"]
    options += [f"-artifact_prefix={job.findings}/{target.name}-", f"-max_len={mutators.LARGEST}", f"-rss_limit_mb={MEMORY_MB}"]
    options += [f"-seed={job.seed}", "-print_final_stats=1", "-reload=0", "-keep_seed=1"]
    if target.words:
        words = Path(job.scratch).parent / "words"
        words.write_text("".join(f'"{_quoted(word)}"\n' for word in target.words))
        options.append(f"-dict={words}")
    return options


def mutator(target: Target, native: Callable[[bytes, int], bytes]) -> Callable[[bytes, int, int], bytes]:
    """libFuzzer's custom mutator: half of the time the target's own changes, now and then an input made large, else libFuzzer's."""

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        chance = Random(seed)
        what = chance.random()
        if len(data) > 2 * USUAL_BYTES:
            data = data[: chance.randrange(USUAL_BYTES)]
        if what < 0.01:
            return mutators.swell(data, chance)[:most]
        if target.mutate is None or what < 0.5:
            return native(data, min(most, USUAL_BYTES))
        return target.mutate(data, chance)[:most]

    return mutate


class Feeding:
    """Feeds inputs to a check, counts them, and ends the process with the first that is a finding."""

    def __init__(self, target: Target, check: Check, findings: Path) -> None:
        self.target, self.check, self.findings = target, check, findings
        self.inputs = 0
        self.told = time.monotonic()

    def __call__(self, data: bytes) -> None:
        self.inputs += 1
        if (error := attempt(self.check, data)) is not None:
            self._found(data, error)
        if not self.inputs & 63 and time.monotonic() - self.told > TELL_S:
            self.told = time.monotonic()
            tell(inputs=self.inputs)

    def _found(self, data: bytes, error: BaseException) -> None:
        small, error = shrunk(self.check, data, error)
        path = self.findings / f"{self.target.name}-{hashlib.sha256(small).hexdigest()[:12]}"
        path.write_bytes(small)
        trace = "".join(traceback.format_exception(error))
        tell(inputs=self.inputs, finding=str(path), error=f"{type(error).__name__}: {error}"[:500], trace=trace[-6000:])
        os._exit(FOUND)


def attempt(check: Check, data: bytes) -> BaseException | None:
    """Feeds one input: what makes it a finding, which is what the check raises, or `Slow`."""
    started = time.process_time()
    try:
        check(data)
    except BaseException as error:
        return error
    took = time.process_time() - started
    return Slow(f"{len(data)} bytes took {took:.1f} s of processor time") if took > SLOW_S else None


def shrunk(check: Check, data: bytes, error: BaseException) -> tuple[bytes, BaseException]:
    """A smaller input that goes wrong in the same way, as far as one is found in `SHRINK_S`."""
    deadline = time.monotonic() + SHRINK_S
    size = len(data) // 2
    while size:
        at = 0
        while at < len(data):
            if time.monotonic() > deadline:
                return data, error
            smaller = data[:at] + data[at + size :]
            found = attempt(check, smaller)
            if found is not None and _alike(found, error):
                data, error = smaller, found
            else:
                at += size
        size //= 2
    return data, error


def _alike(one: BaseException, other: BaseException) -> bool:
    places = [[(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)[-1:]] for error in (one, other)]
    return type(one) is type(other) and places[0] == places[1]


def tell(**said: object) -> None:
    """A line for the parent; without one this process ends."""
    try:
        os.write(2, f"{MARK}{json.dumps(said)}\n".encode())
    except OSError:
        os._exit(1)


def command(job: Job) -> list[str]:
    """How the process of a job is started."""
    return [sys.executable, "-c", BOOT, json.dumps(asdict(job)), json.dumps([*READERS, *own_modules(Path.cwd())])]


def own_modules(root: Path) -> list[str]:
    """Names that a project's own modules begin with: its branches guide the inputs too."""
    names = {path.name.removesuffix(".py") for path in root.iterdir() if path.is_dir() or path.suffix == ".py"}
    return sorted(name for name in names if name.isidentifier())


def _quoted(word: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in word)
