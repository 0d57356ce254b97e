"""Hostile images raise within bounds, every kind of image becomes an RGB PNG, and the folder detects damage."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agentrl.base.media import (
    MAX_SIDE,
    MAX_STORED,
    InvalidImage,
    MediaFolder,
    image_token,
    normalized_image,
    number_text,
    open_png,
    read_array,
)
from agentrl.errors import InfrastructureError

PIXELS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def npy(array: Any, **options: Any) -> bytes:
    np.save(file := io.BytesIO(), array, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def pixels(content: bytes) -> Any:
    image = open_png(content)
    assert (image.mode, image.info) == ("RGB", {})
    return np.asarray(image)


def test_normalization_preserves_pixels_exactly() -> None:
    image = Image.fromarray(PIXELS)
    for content in (encoded(image), encoded(image, pnginfo=None, dpi=(7, 7)), npy(PIXELS), npy(np.asfortranarray(PIXELS))):
        assert (pixels(normalized_image(content)) == PIXELS).all()
    assert normalized_image(normalized_image(encoded(image))) == normalized_image(encoded(image))


def test_every_mode_becomes_rgb_on_a_white_background() -> None:
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    for image in (clear, clear.convert("LA"), Image.new("L", (2, 2), 255), Image.new("1", (2, 2), 1), Image.new("P", (2, 2))):
        result = pixels(normalized_image(encoded(image)))
        assert result.shape == (2, 2, 3) and (result.max() == 255 or image.mode == "P")
    assert (pixels(normalized_image(encoded(Image.new("CMYK", (4, 4)), "JPEG"))) == 255).all()
    assert (pixels(normalized_image(npy(np.asarray(clear)))) == 255).all()


def test_a_photo_is_rotated_by_its_metadata() -> None:
    image = Image.new("RGB", (8, 16))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert pixels(normalized_image(encoded(image, "JPEG", exif=exif))).shape == (8, 16, 3)


def scans(count: int) -> bytes:
    content = encoded(Image.new("RGB", (8, 8)), "JPEG", progressive=True)
    start = content.index(b"\xff\xda")
    return content[:start] + content[start : start + 14] * count + content[start:]


BOMBS = {
    "pixels": png(60000, 60000),
    "side": png(MAX_SIDE + 1, 1),
    "scans": scans(500),
    "cut": encoded(Image.effect_noise((64, 64), 50))[:2000],
    "gif": encoded(Image.fromarray(PIXELS), "GIF"),
    "sixteen": encoded(Image.fromarray(np.zeros((4, 4), np.uint16))),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "empty": b"",
    "noise": bytes(range(256)) * 4,
    "numbers": npy(np.zeros((4, 4))),
    "board": npy(np.zeros((4, 4), np.uint8)),
    "object": npy(np.array([{}], object), allow_pickle=True),
    "structured": npy(np.zeros(3, "u1,f4")),
    "huge": npy(np.zeros((1, 1, 3), np.uint8)).replace(b"(1, 1, 3)", b"(9**9, 3)"),
    "larger": npy(PIXELS).replace(b"(5, 7, 3)", b"(5, 9, 3)"),
    "negative": npy(PIXELS).replace(b"(5, 7, 3)", b"(5,-7,-3)"),
    "code": npy(PIXELS).replace(b"'|u1'", b"open"),
    "version": npy(PIXELS).replace(b"NUMPY\x01", b"NUMPY\x07"),
    "flat": npy(np.zeros((0, 7, 3), np.uint8)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_file_raises(name: str) -> None:
    with pytest.raises(InvalidImage):
        normalized_image(BOMBS[name])


def test_numbers_keep_their_digits() -> None:
    array = np.array([[0.1, -2.5e-8], [1 / 3, np.inf]], np.float32)
    assert read_array(npy(array)).tolist() == array.tolist()
    text = number_text(array)
    assert text == "[[0.1, -2.5e-08], [0.33333334, inf]]"
    assert [np.float32(word) for word in text.replace("[", "").replace("]", "").split(", ")] == array.ravel().tolist()
    assert (number_text(np.array([1, 2])), number_text(np.array(7)), number_text(np.array([True]))) == ("[1, 2]", "7", "[True]")


def test_an_image_is_stored_once_and_read_by_its_hash(tmp_path: Path) -> None:
    media, content = MediaFolder(tmp_path), normalized_image(npy(PIXELS))
    sha256 = media.put(content)
    assert sha256 == hashlib.sha256(content).hexdigest() == media.put(content)
    assert [path.name for path in (tmp_path / "media").iterdir()] == [f"{sha256[:10]}.png"]
    assert MediaFolder(tmp_path).read(sha256[:10]) == content
    (tmp_path / "media" / f"{sha256[:10]}.png").write_bytes(content[:-1])
    with pytest.raises(InfrastructureError, match="damaged"):
        media.read(sha256[:10])
    with pytest.raises(InfrastructureError, match="missing"):
        media.read("0123456789")


def test_a_damaged_file_is_replaced_and_another_image_of_its_name_raises(tmp_path: Path) -> None:
    media, content = MediaFolder(tmp_path), normalized_image(npy(PIXELS))
    path = tmp_path / "media" / f"{media.put(content)[:10]}.png"
    path.write_bytes(b"damaged")
    media.put(content)
    assert path.read_bytes() == content


def test_images_go_to_the_driver_and_come_from_it(tmp_path: Path) -> None:
    driver, content = MediaFolder(tmp_path / "driver"), normalized_image(npy(PIXELS))
    other = normalized_image(npy(PIXELS[:2]))
    host = MediaFolder(tmp_path / "host", fetch=driver.read, send=lambda name, png: driver.put(png))
    assert driver.read(host.put(content)[:10]) == content
    name = driver.put(other)[:10]
    assert host.read(name) == other and (tmp_path / "host" / "media" / f"{name}.png").exists()
    assert host.keep_only({name}) == 1 and host.read(name) == other


def test_only_models_with_a_vision_tower_have_an_image_token(tmp_path: Path) -> None:
    for text, token in (
        ('{"image_token_id": 7, "vision_config": {}}', 7),
        ('{"image_token_index": 8, "vision_config": {}}', 8),
        ('{"image_token_id": 7}', None),
        ('{"image_token_id": "7", "vision_config": {}}', None),
        ("[]", None),
        ("{", None),
    ):
        (tmp_path / "config.json").write_text(text)
        assert image_token(tmp_path) == token
    assert image_token(tmp_path / "absent") is None


@pytest.mark.parametrize("kind", ["large", "folder", "pipe"])
def test_a_path_that_is_no_image_file_is_an_infrastructure_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "media" / "0123456789.png"
    path.parent.mkdir()
    if kind == "large":
        with path.open("wb") as file:
            file.truncate(MAX_STORED + 1)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(InfrastructureError, match="cannot be read"):
        MediaFolder(tmp_path).read("0123456789")
