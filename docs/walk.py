"""Traces one group from the schedule to the update and one version from the learner to serving, and prints the source files that ran.

    python docs/walk.py      # about 20 seconds of CPU; exits with 1 if a limit is exceeded or `how-it-works.md` omits a file

A file of `agentrl/` counts if one of its functions was called during the walk, or a method that `dataclass` generated for one of its
classes. Imports do not count: neither module and class bodies nor what they call. Set-up is not part of the walk: the trace starts after
the recipe, task family, chat format, verifier, runner, store, registry, DeepSpeed engine and server connection are open. The code that
connects the steps between processes (`agentrl.run.loop`, `agentrl.run.rollouts`, `agentrl.learner.worker`) is not traced either; the page
describes it. `walk_parts.py` has the scripted parts.

The last lines count the lines that it takes to add a part from outside, in the pages' examples without blank lines.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "agentrl"
PAGE = ROOT / "docs" / "how-it-works.md"
SECTIONS = (*(f"{number}. " for number in range(2, 9)), "Other files in the trace")
"""The beginnings of the page's headings under which a traced file must be named."""
WALKS = (("a task to a weight update", 45), ("a version from the learner to serving", 15))
"""What a walk is, and the most files that it may take."""

EXAMPLES = (
    ("a verifier", "verifiers.md", "# rewards/same.py\n", 5),
    ("a tool", "task-families.md", "@tool\nasync def search", 6),
    ("an advantage estimator", "parts.md", "# parts/advantage.py\n", 15),
)
"""What is added, the page whose example shows it, how that begins, and the most lines it may take."""


class Trace:
    """A context manager that records the files of `agentrl/` in which a function is called, in order, by thread-safe profile hooks."""

    def __init__(self) -> None:
        self.files: dict[Path, str] = {}  # and the first function that was called in each

    def __enter__(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_flags & 1:  # bit 1, CO_OPTIMIZED: not the body of a module or class
            return
        file = frame.f_code.co_filename
        if file == "<string>" and str(frame.f_globals.get("__name__")).startswith("agentrl."):
            file = str(frame.f_globals.get("__file__"))  # a generated method
        if not file.startswith(f"{PACKAGE}/") or Path(file) in self.files or _is_import(frame):
            return
        self.files[Path(file)] = frame.f_code.co_qualname


def _is_import(frame: FrameType | None) -> bool:
    """Whether the body of a module of `agentrl/` is running."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            return True
        frame = frame.f_back
    return False


def trace_walks() -> tuple[Trace, Trace]:
    """Runs both walks in a temporary run folder."""
    sys.path.insert(0, str(ROOT))
    import walk_parts

    first, second = Trace(), Trace()
    with tempfile.TemporaryDirectory() as folder:
        learner = walk_parts.Learner.open(walk_parts.small_recipe(), Path(folder))
        group, metrics = walk_parts.task_to_update(learner, first)
        if [scored.score.value for scored in group.episodes] != [1.0, 1.0, 0.0, 0.0] or metrics["optimizer_steps"] != 1:
            raise RuntimeError(f"walk.py: the script did not lead to an update; see docs/walk_parts.py: {group}, {metrics}")
        asyncio.run(walk_parts.version_to_serving(learner, group, second))
        learner.close()
    return first, second


def named_files() -> set[Path]:
    """Returns the files that the page names: `agentrl/a/b.py`, those of `agentrl/a/`, or the module of `agentrl.a.b.Name.member`."""
    sections = PAGE.read_text().split("\n## ")
    text = "\n".join(section for section in sections if section.startswith(SECTIONS))
    names = re.findall(r"\bagentrl/[\w/]+(?:\.py|/`)|\bagentrl(?:\.[A-Za-z_]\w*)+", text)
    return {path for name in names for path in _source(name)}


def _source(name: str) -> Iterator[Path]:
    if name.endswith(".py"):
        yield ROOT / name
        return
    if name.endswith("/`"):
        yield from (ROOT / name[:-1]).glob("*.py")
        return
    parts = name.split(".")
    for cut in range(len(parts), 1, -1):
        module = ROOT.joinpath(*parts[:cut]).with_suffix(".py")
        if module.is_file():
            yield module
            return


def lines(page: str, begin: str) -> int:
    """Lines of an example, from `begin` to its end, without blank ones and the comment that names its file."""
    _, found, after = (ROOT / "docs" / page).read_text().partition(begin)
    text = (found + after).partition("\n```")[0]
    return sum(bool(line.strip()) and not line.startswith("# ") for line in text.splitlines())


def main() -> int:
    named, failed = named_files(), False
    for path in sorted(path for path in named if not path.is_file()):
        failed = True
        print(f"{PAGE.name} names a file that does not exist: {path.relative_to(ROOT)}")
    for (what, most), trace in zip(WALKS, trace_walks(), strict=True):
        failed |= len(trace.files) > most or not named.issuperset(trace.files)
        over = ", OVER" if len(trace.files) > most else ""
        print(f"{what}: {len(trace.files)} files (at most {most}{over})")
        for path, function in trace.files.items():
            print(f"  {path.relative_to(ROOT)}: {function}{'' if path in named else '  NOT NAMED'}")
    for what, page, begin, most in EXAMPLES:
        count = lines(page, begin)
        failed |= count > most
        print(f"{what} from outside: {count} lines (at most {most}{', OVER' if count > most else ''})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
