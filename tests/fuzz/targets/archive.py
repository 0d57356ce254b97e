"""The archive that a sandbox is restored from, which a policy may have created.

Nothing is written outside the working directory, and a snapshot of it restores the same files.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

from agentrl.sandbox import frames
from tests.fuzz import mutators
from tests.fuzz.mutators import archive
from tests.fuzz.target import Check, Target, must
from tests.fuzz.targets.desk import Desk

LIMIT = 33 << 20


def prepare(scratch: Path) -> Check:
    desk = Desk(scratch)

    def check(data: bytes) -> None:
        try:
            restored = desk.ask("restore", {}, data) is not None
            if restored and (before := desk.listing()):
                snapshot = desk.ask("snapshot", {"max_bytes": LIMIT}, schema=frames.CHUNK, max_bytes=LIMIT)
                must(snapshot is not None, "no snapshot of a restored working directory")
                desk.tidy()
                must(desk.ask("restore", {}, snapshot or b"") is not None, "a snapshot that cannot be restored")
                must(desk.listing() == before, "a snapshot differs from the working directory")
        finally:
            desk.tidy()

    return check


def seeds() -> Sequence[bytes]:
    file, folder, link, hard = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
    return [
        archive([("a.txt", file, b"content")]),
        archive([("folder", folder, b""), ("folder/b.txt", file, b"x" * 700), ("link", link, b"a.txt")]),
        archive([("out", link, b"/etc"), ("out/x", file, b"written through a link?")]),
        archive([("one", file, b"1"), ("two", hard, b"one"), ("pipe", tarfile.FIFOTYPE, b""), ("disk", tarfile.BLKTYPE, b"")]),
        archive([("n" * 150, file, b"a long name"), ("\N{SNOWMAN}/\N{PILE OF POO}", file, b"another"), ("deep/" * 20 + "x", file, b"")]),
        archive([("../up", file, b"1"), ("/root", file, b"2"), ("a/./b", file, b"3"), ("", file, b"4")]),
        archive([]),
        b"",
    ]


target = Target(
    name="archive",
    about="the tar archive that a sandbox is restored from",
    prepare=prepare,
    seeds=seeds,
    mutate=mutators.tar,
    words=(
        b"ustar\x0000",
        b"path=../x\n",
        b"linkpath=/etc\n",
        b"size=99999999999\n",
        b"GNU.sparse.major=1\n",
        b"GNU.sparse.name=x\n",
        b"././@LongLink",
    ),
)
