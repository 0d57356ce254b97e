"""Sizes a pool of workers from what the machine seems to have.

kind: resources
seconds: 15
"""

import json
import math
import multiprocessing
import os
import subprocess

cores = math.ceil(json.load(open("arena.json"))["cpus"])
seen = {
    "nproc": int(subprocess.run(["nproc"], capture_output=True, check=True).stdout),
    "cpu_count": os.cpu_count() or 0,
    "affinity": len(os.sched_getaffinity(0)),
    "sysconf": os.sysconf("SC_NPROCESSORS_ONLN"),
}
if __name__ == "__main__" and max(seen.values()) <= cores:
    with multiprocessing.get_context("fork").Pool() as pool:
        pool.map(abs, range(100))
print(f"ESCAPED: {seen} for {cores} cores" if max(seen.values()) > cores else f"held: {seen}")
