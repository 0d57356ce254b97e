"""The images of a run: decodes untrusted files within bounds, and stores them by their hash in the folder `media` of the run folder.

An image is stored as an RGB PNG without metadata, so that the server and the learner decode the same pixels.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentrl.base import untrusted_files
from agentrl.base.error_text import one_line_error
from agentrl.base.files import write_atomically
from agentrl.errors import InfrastructureError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

MAX_PIXELS = 1 << 22
MAX_SIDE = 8192
MAX_STORED = 16 << 20
"""Maximum bytes of a stored image. An image with `MAX_PIXELS` pixels needs fewer."""
NUMPY = b"\x93NUMPY"
"""The first bytes of an npy file."""
PNG = b"\x89PNG\r\n\x1a\n"
"""The first bytes of a stored image."""
_SCANS = 64  # maximum scans of a JPEG file; each scan decodes all pixels again
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")
_HEADER = 1000
_CONFIG_BYTES = 1 << 20


class InvalidImage(ValueError):
    """Error: the bytes are not an image, or the image exceeds a size limit."""


class MissingImage(InfrastructureError):
    """Error: a media folder does not contain the requested image. The image may never have existed, because any name can occur in a
    text."""


class MediaFolder:
    """The images of one run, by name: the first 10 hexadecimal digits of the sha256 of their files. Safe for use by several threads and
    processes.

    On a host without the run folder, `fetch` returns a file from the driver, and `send` stores a file at the driver.
    """

    def __init__(
        self, run_dir: Path, *, fetch: Callable[[str], bytes] | None = None, send: Callable[[str, bytes], object] | None = None
    ) -> None:
        self.folder = run_dir / "media"
        self._fetch, self._send = fetch, send
        self._sent: set[str] = set()

    def put(self, png: bytes) -> str:
        """Stores a normalized image durably, here and at the driver, and returns its sha256. Raises `InvalidImage` if a different image has
        the same name, and `OSError` if the file cannot be written."""
        sha256 = hashlib.sha256(png).hexdigest()
        name, stored = sha256[:10], self._local(sha256[:10])
        if not int(name, 16) or (stored not in (None, png) and _name(stored or b"") == name):
            raise InvalidImage("the sha256 of a different image starts with the same 10 digits")
        if self._send is not None and name not in self._sent:  # a copy of an earlier session may be missing at the driver
            self._send(name, png)
            self._sent.add(name)
        if stored != png:
            self._write(name, png)
        return sha256

    def read(self, name: str) -> bytes:
        """Returns the bytes of an image's file. Raises `MissingImage` if there is no such image, and `InfrastructureError` if the file is
        damaged, is no regular file of at most `MAX_STORED` bytes or cannot be read, or if the driver does not respond."""
        try:
            content = self._local(name)
        except (OSError, ValueError) as error:
            reason = one_line_error(error)
            raise InfrastructureError(
                f"{self._path(name)} cannot be read: {reason}\n  fix: restore the run's folder media from a copy"
            ) from error
        if content is None and self._fetch is not None:
            with contextlib.suppress(LookupError):
                content = self._fetch(name)
                if _name(content) == name:
                    self._write(name, content)
        if content is None or _name(content) != name:
            kind, state = (MissingImage, "missing") if content is None else (InfrastructureError, "damaged")
            raise kind(f"{self._path(name)} is {state}\n  fix: restore the run's folder media from a copy")
        return content

    def keep_only(self, names: set[str]) -> int:
        """Deletes all images whose names are not in `names`, and returns the number of deleted images."""
        unused = [path for path in self.folder.glob("*.png") if path.stem not in names]
        for path in unused:
            path.unlink()
        return len(unused)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.png"

    def _local(self, name: str) -> bytes | None:
        try:
            return untrusted_files.read_bytes(self._path(name), most=MAX_STORED)
        except FileNotFoundError:
            return None

    def _write(self, name: str, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path(name), content, tag=f"{os.getpid()}-{threading.get_ident()}", durable=True)


def _name(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:10]


def normalized_image(content: bytes) -> bytes:
    """Returns the image in a PNG or JPEG file, or in an npy file of uint8 [H, W, 3 or 4], as an RGB PNG file with a white background.
    Raises `InvalidImage` if the file is invalid, or if the image has more than `MAX_PIXELS` pixels or a side longer than `MAX_SIDE`."""
    from PIL import Image, ImageOps

    try:
        if content.startswith(NUMPY):
            image: Image.Image = Image.fromarray(_pixels(content))
        else:
            if content.count(b"\xff\xda") > _SCANS and content.startswith(b"\xff\xd8"):
                raise InvalidImage(f"it has more than {_SCANS} scans")
            image = Image.open(io.BytesIO(content), formats=("PNG", "JPEG"))
        width, height = image.size
        if not 0 < width <= MAX_SIDE or not 0 < height <= MAX_SIDE or width * height > MAX_PIXELS:
            raise InvalidImage(f"it has {width} x {height} pixels; at most {MAX_PIXELS:,} pixels, and {MAX_SIDE:,} per side, are allowed")
        if image.mode not in _MODES:
            raise InvalidImage(f"its mode is {image.mode}, not one of {', '.join(_MODES)}")
        image = ImageOps.exif_transpose(image).convert("RGBA")
        clean = Image.new("RGB", image.size, "white")
        clean.paste(image, mask=image.getchannel("A"))
        clean.save(file := io.BytesIO(), "PNG", compress_level=3)
        return file.getvalue()
    except (InvalidImage, MemoryError):
        raise
    except Exception as error:  # decoders raise arbitrary errors on untrusted files
        raise InvalidImage(f"it is not a PNG, JPEG or npy file: {one_line_error(error)}") from error


def open_png(png: bytes) -> Image:
    """Returns a stored image, decoded."""
    from PIL import Image

    return Image.open(io.BytesIO(png), formats=("PNG",)).convert("RGB")


def read_array(content: bytes) -> NDArray[Any]:
    """Returns the array in an npy file. Raises `InvalidImage` if the file is invalid or contains objects, which are never unpickled."""
    import numpy as np

    try:
        file, layout = io.BytesIO(content), cast(Any, np.lib.format)
        read = {(1, 0): layout.read_array_header_1_0, (2, 0): layout.read_array_header_2_0}[layout.read_magic(file)]
        shape, fortran, dtype = read(file, max_header_size=_HEADER)
        if dtype.kind not in "biuf" or math.prod(shape) * dtype.itemsize != len(content) - file.tell():
            raise InvalidImage(f"an npy file of {dtype} {shape} has {len(content)} bytes, which do not fit, or has no numbers")
        return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
    except (InvalidImage, MemoryError):
        raise
    except Exception as error:  # its parser raises arbitrary errors on untrusted files
        raise InvalidImage(f"it is not an npy file: {one_line_error(error)}") from error


def is_pixels(array: NDArray[Any]) -> bool:
    """Whether an array is an image: uint8 [H, W, 3 or 4]."""
    return array.dtype.name == "uint8" and array.ndim == 3 and array.shape[2] in (3, 4)


def number_text(array: NDArray[Any]) -> str:
    """Returns the numbers of an array as text such as `[[0.1, 2.0], [3.0, 4.0]]`, each with the fewest digits that identify it."""
    if array.ndim == 0:
        return str(array[()])
    return f"[{', '.join(map(number_text, array))}]"


def _pixels(content: bytes) -> NDArray[Any]:
    array = read_array(content)
    if not is_pixels(array):
        raise InvalidImage(f"an image must be uint8 [H, W, 3 or 4], not {array.dtype} {list(array.shape)}")
    return array


def image_token(folder: Path) -> int | None:
    """Returns the id of the token that represents a part of an image for the model in a folder; None if the model reads only text or has no
    readable config.json."""
    try:
        config = json.loads(untrusted_files.read_bytes(folder / "config.json", most=_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    token = config.get("image_token_id", config.get("image_token_index")) if isinstance(config, dict) else None
    return token if isinstance(token, int) and isinstance(config.get("vision_config"), dict) else None


def load_processor(folder: str | Path) -> Any:
    """Returns the processor of a model folder. Imports transformers. Raises the errors of `AutoProcessor.from_pretrained`."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder, trust_remote_code=False)


def process_images(processor: Any, text: str, images: Sequence[Image], **options: Any) -> Any:
    """Calls the processor once. Returns the token ids of the prompt, including image tokens, and the model's inputs for the images."""
    return processor(text=text, images=list(images), add_special_tokens=False, **options)
