"""Compares the weights of two versions tensor by tensor, in blocks of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from agentrl.base.scratch import ScratchFolder
from agentrl.records import ADAPTER, WHOLE_MODEL
from agentrl.version import deltas

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK = 1 << 20
"""Maximum number of elements of each tensor that are in memory at once."""
_DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"},  # bfloat16 is the upper half of a float32
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1", "BOOL": "<u1"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """The change of one tensor. Norms are Euclidean norms over all elements of the tensor, in float64."""

    name: str
    numbers: int
    changed: int  # numbers that differ
    before: float  # norm before
    after: float  # norm after
    difference: float  # norm of after minus before
    largest: float  # largest absolute difference

    @property
    def relative(self) -> float:
        """The norm of the difference relative to the norm before; 0 if nothing changed; infinite if only the norm before is 0."""
        if not self.difference:
            return 0.0
        return self.difference / self.before if self.before else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    dtype: str
    numbers: int
    start: int  # first byte in the file


def compare_weights(before: Path, after: Path) -> Iterator[TensorChange]:
    """Yields the change of each tensor between two version folders, in the order of the tensors' names.

    Versions may be complete, deltas, or adapters. If one version is an adapter, the adapters are compared, and a version that has no
    adapter counts as an adapter of zeros. Raises `ValueError` if weights are missing or damaged, if a dtype cannot be compared, or if the
    tensors do not match.
    """
    adapters = [(folder / ADAPTER).is_file() for folder in (before, after)]
    with ExitStack() as stack:
        if any(adapters):
            old, new = (folder / ADAPTER if adapted else None for folder, adapted in zip((before, after), adapters, strict=True))
        else:
            old, new = (stack.enter_context(_complete_weights(folder)) for folder in (before, after))
        ours, theirs = _stored(old), _stored(new)
        for name in sorted(ours.keys() | theirs.keys()):
            one, other = ours.get(name), theirs.get(name)
            if not any(adapters) and (one is None or other is None):
                raise ValueError(f"tensor {name} exists only in {before if one else after}")
            if one is not None and other is not None and one.numbers != other.numbers:
                raise ValueError(f"tensor {name} has {one.numbers} elements in {before}, but {other.numbers} in {after}")
            yield _change(name, old, one, new, other)


@contextmanager
def _complete_weights(folder: Path) -> Iterator[Path]:
    """Yields the path of a version's complete weight file, which is temporary if the version is a delta."""
    weights = folder / WHOLE_MODEL
    if weights.is_file():
        yield weights
        return
    with ScratchFolder() as scratch:
        target = scratch / WHOLE_MODEL
        deltas.write_complete(folder, target)
        yield target


def _stored(path: Path | None) -> dict[str, _Stored]:
    """Returns the tensors in a safetensors file, by name, with offsets that are checked against the size of the file. Raises
    `ValueError`."""
    if path is None:
        return {}
    try:
        header, size = deltas.read_safetensors_header(path), path.stat().st_size
        with path.open("rb") as file:
            first = 8 + int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    return {name: _entry(path, name, entry, first, size) for name, entry in header.items()}


def _entry(path: Path, name: str, entry: Mapping[str, Any], first: int, size: int) -> _Stored:
    dtype, offsets = entry.get("dtype"), entry.get("data_offsets")
    if dtype not in _DTYPES:
        raise ValueError(f"{path}: tensor {name[:200]} has dtype {str(dtype)[:40]}; only {', '.join(_DTYPES)} can be compared")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise ValueError(f"{path}: tensor {name[:200]} has no valid offsets")
    start, end = offsets
    width = int(_DTYPES[dtype][-1])
    if not 0 <= start <= end <= size - first or (end - start) % width:
        raise ValueError(f"{path}: tensor {name[:200]} has offsets outside the file, or an invalid length")
    return _Stored(dtype=dtype, numbers=(end - start) // width, start=first + start)


def _change(name: str, old: Path | None, one: _Stored | None, new: Path | None, other: _Stored | None) -> TensorChange:
    import numpy as np  # imported late: the commands that list versions need no numpy

    numbers = max(stored.numbers for stored in (one, other) if stored is not None)
    changed, largest, squares = 0, 0.0, [0.0, 0.0, 0.0]
    with ExitStack() as stack, np.errstate(all="ignore"):  # weights that are not finite result in a norm that is not finite
        files = [None if path is None else stack.enter_context(path.open("rb")) for path in (old, new)]
        for start in range(0, numbers, BLOCK):
            count = min(BLOCK, numbers - start)
            first, second = (_block(file, stored, start, count) for file, stored in zip(files, (one, other), strict=True))
            difference = second - first
            changed += int(np.count_nonzero(difference))  # NaN counts as changed
            largest = float(np.fmax(largest, np.max(np.abs(difference), initial=0.0)))
            for index, values in enumerate((first, second, difference)):
                squares[index] += float(np.dot(values, values))
    before, after, apart = (math.sqrt(total) for total in squares)
    return TensorChange(name=name, numbers=numbers, changed=changed, before=before, after=after, difference=apart, largest=largest)


def _block(file: BinaryIO | None, stored: _Stored | None, start: int, count: int) -> NDArray[np.float64]:
    """Returns the elements from `start` to `start + count` of a tensor; zeros if there is no tensor."""
    import numpy as np

    if file is None or stored is None:
        return np.zeros(count)
    dtype = np.dtype(_DTYPES[stored.dtype])
    file.seek(stored.start + start * dtype.itemsize)
    data = file.read(count * dtype.itemsize)
    if len(data) != count * dtype.itemsize:
        raise ValueError("a weight file became shorter while it was read")
    values = np.frombuffer(data, dtype)
    if stored.dtype == "BF16":
        values = (values.astype("<u4") << 16).view("<f4")
    return values.astype(np.float64)
