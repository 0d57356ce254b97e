"""Measures the distribution of a version to hosts that do not share the driver's disk.

    python benchmarks/cluster_weights.py                       # 100 and 500 MB to 1 and 4 hosts over 200 Mbit/s
    python benchmarks/cluster_weights.py --megabytes 100 --hosts 1 2 4 8 --mbit 1000

Driver and hosts are network namespaces on one bridge; `tc tbf` limits each direction of each host. Every host fetches the version into an
empty mirror, all at the same time, and checks it. Requires root. Prints a Markdown table:

    seconds      from the start until the last host has the complete version, checked and on disk
    bound        bytes of the version at the rate of one link, without headers
    driver sent  bytes that left the driver, in sizes of the version
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.base.files import folder_manifest  # noqa: E402
from agentrl.cluster.link import KEY_VARIABLE  # noqa: E402
from agentrl.cluster.run_service import HOST  # noqa: E402
from tests.cluster.hosts import Host, hosts  # noqa: E402
from tests.cluster.serving import Driver, driving  # noqa: E402

NAME = "versions/000001"
HEAD = "| version | hosts | seconds | bound, s | seconds / bound | seconds / 1 host | driver sent |"
MIRROR = """
import asyncio, sys
from pathlib import Path
from agentrl.cluster.link import Link, take_key
from agentrl.cluster.mirror import Mirror
from agentrl.cluster.mirror_host import relaying

async def main(folder, url, address, name):
    mirror = Mirror(Path(folder), Link(url, take_key()))
    async with relaying(mirror, host=address):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.to_thread(mirror.fetch, name)
        print("done", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """One distribution."""

    seconds: float
    sent: int  # bytes that left the driver's host


def distribute(driver: Driver, source: Host, targets: Sequence[Host], folder: Path) -> Distribution:
    """Fetches the version on every target host into an empty mirror below `folder`."""
    mirrors: list[subprocess.Popen[str]] = []
    for number, target in enumerate(targets):
        arguments = ("-c", MIRROR, str(folder / str(number)), driver.url, target.address, NAME)
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), KEY_VARIABLE: driver.service.new_key(HOST)}
        mirrors.append(target.python(*arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for mirror in mirrors:
        _expect(mirror, "ready")
    before, start = _sent(source), time.perf_counter()
    for mirror in mirrors:
        _say(mirror)
    for mirror in mirrors:
        _expect(mirror, "done")
    seconds, sent = time.perf_counter() - start, _sent(source) - before
    for mirror in mirrors:
        _say(mirror)
        mirror.wait(60)
    expected = folder_manifest(driver.folder / NAME)
    for number in range(len(targets)):
        if folder_manifest(folder / str(number) / NAME) != expected:
            sys.exit(f"error: the files of host {number} differ from those of the driver")
    return Distribution(seconds=seconds, sent=sent)


def measure(megabytes: int, counts: Sequence[int], mbit: float) -> None:
    """Prints the rows of one size."""
    size, alone = megabytes * 1_000_000, 0.0
    for count in counts:
        with tempfile.TemporaryDirectory() as name, hosts(1 + count, rate_mbit=mbit) as (source, *targets):
            folder = Path(name)
            with driving(folder / "run", host=source.address, within=source.enter) as driver:
                version = driver.folder / NAME
                version.mkdir(parents=True)
                with (version / "model.safetensors").open("wb") as file:
                    rng = random.Random(megabytes)
                    for _ in range(megabytes):
                        file.write(rng.randbytes(1_000_000))
                driver.files.index.list_folder(version)  # the driver hashes a version once
                distribution = distribute(driver, source, targets, folder / "hosts")
        alone = alone or distribution.seconds
        bound = size * 8 / (mbit * 1e6)
        ratios = f"{distribution.seconds / bound:.2f} | {distribution.seconds / alone:.2f} | {distribution.sent / size:.2f}"
        print(f"| {megabytes} MB | {count} | {distribution.seconds:.2f} | {bound:.2f} | {ratios} |", flush=True)


def _sent(host: Host) -> int:
    completed = host.run("cat", "/sys/class/net/eth0/statistics/tx_bytes", capture_output=True, text=True)
    return int(completed.stdout)


def _expect(mirror: subprocess.Popen[str], word: str) -> None:
    assert mirror.stdout is not None
    if mirror.stdout.readline().strip() != word:
        sys.exit("error: a mirror failed; its output is above")


def _say(mirror: subprocess.Popen[str]) -> None:
    assert mirror.stdin is not None
    mirror.stdin.write("go\n")
    mirror.stdin.flush()


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of each link")
    arguments = parser.parse_args()
    print(HEAD)
    print("| --- " * HEAD.count(" |") + "|")
    for megabytes in arguments.megabytes:
        measure(megabytes, arguments.hosts, arguments.mbit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
