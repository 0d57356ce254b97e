"""Images for a vision-language model: converts references in text to the exact token ids that the model's processor assigns to the
images."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from re import Match
from typing import Any

from agentrl.base.error_text import one_line_error
from agentrl.base.media import (
    InvalidImage,
    MediaFolder,
    MissingImage,
    image_token,
    load_processor,
    normalized_image,
    open_png,
    process_images,
)
from agentrl.errors import UserError
from agentrl.records.images import MARK, MAX_IMAGES, NAME_DIGITS, REFERENCE, image_ids

UNREADABLE = "(an image that this model cannot read)"
_CACHED = 1024  # images whose token ids are cached
_OTHER_MODEL = "use a model whose image processor in transformers uses Pillow, such as SmolVLM (Idefics3), or install torchvision"


class ImageTokens:
    """Reads the images in text for one model.

    Args:
        processor: the model's processor from transformers.
        token: the token id that stands for a part of an image.
        render: renders one user message with the given content, using the model's chat template.
        media: where images are stored; None stores no images, for checks before a run has a folder.
    """

    def __init__(self, processor: Any, token: int, render: Callable[[Any], str], *, media: MediaFolder | None = None) -> None:
        self.token, self._processor, self._media = token, processor, media
        self.around = _placeholder(render, str(processor.image_token))
        self._known: dict[str, tuple[int, ...]] = {}  # sha256 -> token ids

    @classmethod
    def load(cls, folder: str, render: Callable[[Any], str], media: MediaFolder | None = None) -> ImageTokens | None:
        """Loads the processor from a model folder; returns None if the model reads only text. Raises `UserError` if the processor is
        unusable."""
        token = image_token(Path(folder))
        if token is None:
            return None
        try:
            processor = load_processor(folder)
            known = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        except Exception as error:  # processors raise arbitrary errors
            raise UserError(f"policy.model: its image processor cannot be used: {one_line_error(error)}", fix=_OTHER_MODEL) from error
        if known != token:
            raise UserError(
                f"policy.model: its processor writes token {known} for images, but its config.json specifies {token}", fix=_OTHER_MODEL
            )
        return cls(processor, token, render, media=media)

    def refer(self, text: str) -> str:
        """Stores the images in a string, and returns the string with references to them. Raises `InvalidImage` if an image is invalid or
        rejected by the processor, or if there are more than `MAX_IMAGES`."""
        if sum(match[2] is not None for match in REFERENCE.finditer(text)) > MAX_IMAGES:
            raise InvalidImage(f"a text shows more than {MAX_IMAGES} images")
        return REFERENCE.sub(lambda match: match[0] if match[2] is None else f"{MARK}sha256:{self._stored(match[2])[0]}>", text)

    def ids(self, text: str, encode: Callable[[str], list[int]]) -> tuple[int, ...]:
        """Returns the token ids of a string. Anything that is not a valid reference to an image stays text. Raises `InfrastructureError` if
        a stored image is damaged, and `UserError` if a text with images also contains the processor's token for images."""
        blocks: list[tuple[int, ...]] = []

        def placeholder(match: Match[str]) -> str:
            try:
                sha256, png = self._stored(match[2]) if match[1] is None else (match[1], self._read(match[1]))
            except (InvalidImage, MissingImage, LookupError):
                return match[0]
            blocks.append(image_ids(self._tokens(sha256, png), sha256))
            return self.around

        ids = encode(REFERENCE.sub(placeholder, text))
        if not blocks:
            return tuple(ids)
        if ids.count(self.token) != len(blocks):
            raise UserError(f"text with images must not contain {self._processor.image_token!r}", fix="remove this token from the text")
        waiting = iter(blocks)
        return tuple(token for token_id in ids for token in (next(waiting) if token_id == self.token else (token_id,)))

    def _stored(self, data: str) -> tuple[str, bytes]:
        try:
            png = normalized_image(base64.b64decode(data, validate=True))
        except ValueError as error:
            raise InvalidImage(f"not an image: {error}") from error
        self._tokens(sha256 := hashlib.sha256(png).hexdigest(), png)  # raises if the processor rejects the image: its source is at fault
        return (sha256 if self._media is None else self._media.put(png)), png

    def _read(self, sha256: str) -> bytes:
        if self._media is None:
            raise LookupError(sha256)
        png = self._media.read(sha256[:NAME_DIGITS])
        if hashlib.sha256(png).hexdigest() != sha256:
            raise LookupError(sha256)
        return png

    def _tokens(self, sha256: str, png: bytes) -> tuple[int, ...]:
        known = self._known.get(sha256)
        if known is None:
            try:
                known = tuple(process_images(self._processor, self._processor.image_token, [open_png(png)])["input_ids"][0])
            except MemoryError:
                raise
            except Exception as error:  # processors raise arbitrary errors, for instance on an image of one pixel
                raise InvalidImage(f"the model's processor rejects the image: {one_line_error(error)}") from error
            if len(self._known) >= _CACHED:
                self._known.pop(next(iter(self._known)), None)
            self._known[sha256] = known
        return known


def _placeholder(render: Callable[[Any], str], token: str) -> str:
    """Returns what the chat template writes for an image; the processor's token if the template does not support images."""
    dash = {"type": "text", "text": "-"}
    try:
        plain, shown = render([dash, dash]), render([dash, {"type": "image"}, dash])
    except Exception:  # a template is a program, and may raise anything
        return token
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, shown, strict=False)))
    text = shown[start : len(shown) - len(plain) + start]
    return text if text.count(token) == 1 and len(text) <= 200 else token
