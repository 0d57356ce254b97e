"""Reads torch files without running code from them.

`torch.load` reads pickles. With `weights_only=False`, which DeepSpeed passes, a file can run any program. Here every load accepts only
tensors, plain values and the three classes below.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import LearnerError

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # read by torch at each load; it overrides a caller's weights_only=False


@contextmanager
def tensors_only(what: str) -> Iterator[None]:
    """Within the block, every `torch.load` of this process and its children accepts only tensors and plain values.

    Raises `LearnerError`, which includes `what`, for a file with anything else.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    except pickle.UnpicklingError as error:
        raise LearnerError(
            f"{what} holds more than tensors and plain values ({_first_line(error)}); none of its code was run\n"
            "  fix: resume from a checkpoint that this run has written"
        ) from error
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def read(path: Path) -> Any:
    """Returns the content of a file, on the CPU. Use inside `tensors_only`."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _first_line(error: Exception) -> str:
    """The first relevant line of torch's message, without its advice to load the file with pickle."""
    lines = [line.strip() for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line]
    return (lines or [type(error).__name__])[0][:300]
