"""Targets with planted bugs, for tests of the fuzzer itself."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.target import Check, Target


def raises(scratch: Path) -> Check:
    def check(data: bytes) -> None:
        """Raises for a word that random inputs would not contain. Each branch must count as progress."""
        if data[:1] == b"b" and data[1:2] == b"u" and data[2:3] == b"g":
            raise KeyError("planted")

    return check


def superlinear(scratch: Path) -> Check:
    def check(data: bytes) -> None:
        if len(data) > 20_000:
            for _ in range(len(data) * len(data) // 400):
                pass

    return check


def never_ends(scratch: Path) -> Check:
    def check(data: bytes) -> None:
        while data.startswith(b"!"):
            pass

    return check


def ends_the_process(scratch: Path) -> Check:
    def check(data: bytes) -> None:
        raise SystemExit(0)

    return check


def holds(scratch: Path) -> Check:
    return lambda data: None


def _target(name: str, prepare: object) -> Target:
    assert callable(prepare)
    return Target(name=name, about="planted", prepare=prepare, seeds=lambda: [b"seed"], brief=5000)


raising = _target("raising", raises)
slow = _target("slow", superlinear)
endless = _target("endless", never_ends)
ending = _target("ending", ends_the_process)
sound = _target("sound", holds)
