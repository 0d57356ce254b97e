"""Lists the source files that `how-it-works.md` leads through, from a task to a weight update and from a version to serving, and how
many lines it takes to add a part from outside.

python docs/walk.py            # prints the files, each once, in the order of the page; then the lines

What a reader opens to follow the page is what it names; the lines are those of the pages' examples that are not blank. A test holds
that every name exists, that the examples work, and all counts to their bounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-it-works.md"
WALKS = (("a task to a weight update", 2, 7, 30), ("a version from the learner to serving", 8, 8, 12))
"""What a walk is, its first and last numbered section, and the most files it may take."""


EXAMPLES = (
    ("a verifier", "verifiers.md", "# rewards/same.py\n", 5),
    ("a tool", "task-families.md", "@tool\nasync def search", 6),
    ("an advantage estimator", "parts.md", "# parts/advantage.py\n", 15),
)
"""What is added, the page whose example shows it, how that begins, and the most lines it may take."""


def lines(page: str, begin: str) -> int:
    """Lines of an example, from `begin` to its end, without blank ones and the comment that names its file."""
    _, found, after = (ROOT / "docs" / page).read_text().partition(begin)
    text = (found + after).partition("\n```")[0]
    return sum(bool(line.strip()) and not line.startswith("# ") for line in text.splitlines())


def section(number: int) -> str:
    """The text of a numbered section of the page."""
    _, _, after = PAGE.read_text().partition(f"\n## {number}. ")
    return after.partition("\n## ")[0]


def source(name: str) -> Path | None:
    """The file that `agentrl/a/b.py` or `agentrl.a.b.Name.member` is in; None for a folder and for other words."""
    if name.endswith(".py"):
        return ROOT / name
    parts = name.split(".")
    for cut in range(len(parts), 1, -1):
        module = ROOT.joinpath(*parts[:cut]).with_suffix(".py")
        if module.is_file():
            return module
    return None


def files(first: int, last: int) -> list[Path]:
    """The files that the sections name, in their order."""

    def named() -> Iterator[Path]:
        for number in range(first, last + 1):
            for name in re.findall(r"\bagentrl/[\w/]+\.py|\bagentrl(?:\.[A-Za-z_]\w*)+", section(number)):
                if (found := source(name)) is not None:
                    yield found

    return list(dict.fromkeys(named()))


def main() -> None:
    for what, first, last, most in WALKS:
        opened = files(first, last)
        print(f"{what}: {len(opened)} files (at most {most})")
        for path in opened:
            print(f"  {path.relative_to(ROOT)}")
    for what, page, begin, most in EXAMPLES:
        print(f"{what} from outside: {lines(page, begin)} lines (at most {most})")


if __name__ == "__main__":
    main()
