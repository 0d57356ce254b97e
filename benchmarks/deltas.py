"""Measures the size of a delta relative to its version, and the time to create and apply it.

    python benchmarks/deltas.py                              # synthetic updates of a random model
    python benchmarks/deltas.py runs/quickstart/versions     # and consecutive versions of a run

A synthetic update is an AdamW step in the middle of a run: the moments come from noisy gradients with a small drift, master weights are
float32, and weights are rounded to the served type. Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from agentrl.base.files import numbered_folders
from agentrl.version import deltas

HEAD = "| update | numbers changed | bytes changed | delta, share of the file | make, s | apply and check, s |"


def measure(old: Path, new: Path, folder: Path) -> str:
    """Returns the figures of one row: the delta from one file to another."""
    before, after = (np.fromfile(path, np.uint8) for path in (old, new))
    if len(before) != len(after):
        return "files differ in length: published whole | | | | |"
    stride = deltas._stride(new)
    body = len(after) - len(after) % stride
    numbers = (before[:body].reshape(-1, stride) != after[:body].reshape(-1, stride)).any(1).mean()
    began = time.perf_counter()
    delta = deltas.write_delta(old, new, folder, number=0)
    written = time.perf_counter()
    assert delta is not None
    copy = folder / "copy"
    shutil.copyfile(old, copy)
    applying = time.perf_counter()
    deltas.apply_delta(folder, copy)
    applied = time.perf_counter()
    share = (folder / deltas.DELTA_FILE).stat().st_size / delta.size
    return f"{numbers:.1%} | {(before != after).mean():.1%} | {share:.1%} | {written - began:.2f} | {applied - applying:.2f} |"


def synthetic(folder: Path, dtype: torch.dtype, lr: float, size: int) -> str:
    """One AdamW step after twenty of them, on `size` weights drawn like those of a trained model."""
    torch.manual_seed(0)
    master = torch.nn.Parameter(torch.randn(size) * 0.02)
    optimizer = torch.optim.AdamW([master], lr=lr, weight_decay=0.0)
    drift = torch.randn(size) * 0.1
    files = [folder / "old.safetensors", folder / "new.safetensors"]
    for step in range(21):
        master.grad = drift + torch.randn(size)
        optimizer.step()
        if step >= 19:
            save_file({"weights": master.detach().to(dtype).view(-1, 1024)}, files[step - 19])
    old, new = files
    return measure(old, new, folder)


def cast(path: Path, target: Path, dtype: torch.dtype) -> Path:
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="?", type=Path, help="versions/ folder of a run")
    parser.add_argument("--size", type=int, default=2**24, help="weights of the synthetic model")
    arguments = parser.parse_args()
    print(HEAD)
    print("| --- " * 6 + "|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for dtype in (torch.float32, torch.bfloat16):
            for lr in (3e-4, 1e-5, 1e-6, 1e-7):
                print(
                    f"| synthetic, {str(dtype).removeprefix('torch.')}, lr {lr:g} | {synthetic(folder, dtype, lr, arguments.size)}",
                    flush=True,
                )
        if arguments.versions:
            folders = [folder for folder in numbered_folders(arguments.versions) if int(folder.name)]
            paths = [path for folder in folders if (path := folder / "model.safetensors").exists()]
            pairs = list(itertools.pairwise(paths))
            if not pairs:
                print("the folder does not contain two consecutive versions with complete weights", file=sys.stderr)
                return 1
            for title, dtype in (("as published", None), ("rounded to bfloat16", torch.bfloat16)):
                for old, new in (pairs[0], pairs[-1]):
                    files = (old, new) if dtype is None else (cast(old, folder / "a", dtype), cast(new, folder / "b", dtype))
                    print(f"| versions {int(old.parent.name)} to {int(new.parent.name)}, {title} | {measure(*files, folder)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
