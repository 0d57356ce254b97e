from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from agentrl.version.weight_files import check_same_shapes, checked_weight_paths, tensor_shapes


@pytest.fixture
def version(tmp_path: Path) -> Path:
    folder = tmp_path / "versions" / "1"
    folder.mkdir(parents=True)
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def paths(version: Path, sizes: dict[str, int], *, folder: Path | None = None) -> list[Path]:
    return checked_weight_paths(folder or version, sizes, below=version.parent, first_folder=version.parent.parent / "base")


def test_complete_files_below_the_versions_folder_pass(version: Path) -> None:
    file = version / "model.safetensors"
    assert paths(version, {file.name: file.stat().st_size}) == [file]
    assert tensor_shapes([file]) == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize("name", ["../1/model.safetensors", "/etc/passwd", "sub/model.safetensors", "missing.safetensors"])
def test_paths_outside_the_folder_raise(version: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"outside|missing"):
        paths(version, {name: 10})


def test_a_link_out_of_the_folder_raises(version: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"12345")
    (version / "link.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="outside"):
        paths(version, {"link.safetensors": 5})


def test_other_folders_and_truncated_files_raise(version: Path) -> None:
    size = (version / "model.safetensors").stat().st_size
    with pytest.raises(ValueError, match="not below"):
        paths(version, {"model.safetensors": size}, folder=version.parent)
    with pytest.raises(ValueError, match="not below"):
        paths(version, {"model.safetensors": size}, folder=version / "../../elsewhere")
    with pytest.raises(ValueError, match="bytes long"):
        paths(version, {"model.safetensors": size + 1})
    with pytest.raises(ValueError, match="no weight files"):
        paths(version, {})


@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 64, b"\x05\0\0\0\0\0\0\0[1,2]"])
def test_other_formats_than_safetensors_raise(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="not a safetensors file"):
        tensor_shapes([path])


def test_another_shape_raises_with_the_tensors_name() -> None:
    check_same_shapes({"a": (2, 3)}, {"a": (2, 3)})
    for shapes in ({}, {"a": (3, 2)}, {"a": (2, 3), "b": (1,)}):
        with pytest.raises(ValueError, match=r"tensor [ab]"):
            check_same_shapes({"a": (2, 3)}, shapes)
