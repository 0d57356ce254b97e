"""Adds the images of a prompt to a request to vLLM, which expands and processes them with the model's processor.

vLLM returns the prompt's token ids after the expansion. These ids are compared with the ids in the prompt, to ensure that the server and
the learner see the same image tokens.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.base.media import MediaFolder, image_token
from agentrl.errors import RequestRefused, ServingError
from agentrl.records.images import MAX_IN_PROMPT, image_blocks, plain_ids

SERVER_ARGUMENTS = {"--limit-mm-per-prompt": json.dumps({"image": MAX_IN_PROMPT, "video": 0, "audio": 0})}
"""Arguments for a server whose model reads images."""


class PromptImages:
    """Puts the images of a run into requests.

    Args:
        run_dir: the run folder.
        token: the token id that represents a part of an image.
    """

    def __init__(self, run_dir: Path, token: int) -> None:
        self._media, self._token = MediaFolder(run_dir), token

    @classmethod
    def of(cls, run_dir: Path, model: Path) -> PromptImages | None:
        """Returns the images of a run whose model is in the folder `model`, or None if the model reads only text."""
        token = image_token(model)
        return None if token is None else cls(run_dir, token)

    def fields(self, prompt_ids: Sequence[int], cache_salt: str) -> dict[str, Any]:
        """Returns the request fields that contain the prompt and its images.

        vLLM caches the outputs of the vision tower by `uuid`, so each `uuid` contains the salt of the weights. Raises `RequestRefused` if
        the prompt contains an image token outside an image or too many images, and `InfrastructureError` if an image cannot be read.
        """
        parts: list[dict[str, str]] = []
        token_ids: list[int] = []
        done = 0
        for start, end, name in [*image_blocks(prompt_ids), (len(prompt_ids), len(prompt_ids), "")]:
            if self._token in (text := prompt_ids[done:start]):
                raise RequestRefused(f"the prompt contains token {self._token} outside of an image")
            token_ids += text
            if name:
                token_ids.append(self._token)
                url = f"data:image/png;base64,{base64.b64encode(self._media.read(name)).decode()}"
                parts.append({"type": "image_url", "url": url, "uuid": f"{cache_salt}-{name}"})
            done = end
        if len(parts) > MAX_IN_PROMPT:
            raise RequestRefused(f"the prompt contains {len(parts)} images; at most {MAX_IN_PROMPT} are allowed")
        return {"token_ids": token_ids} | ({"content_parts": parts, "return_token_ids": True} if parts else {})

    def check(self, answer: Any, prompt_ids: Sequence[int]) -> None:
        """Raises `ServingError` unless the server computed the completion from exactly these prompt tokens. Does not check a prompt without
        images."""
        plain = plain_ids(prompt_ids)
        if plain != list(prompt_ids) and (not isinstance(answer, dict) or answer.get("prompt_token_ids") != plain):
            raise ServingError(
                "the server expanded the images of a prompt to different tokens than the model's processor on this host\n"
                "  fix: use the same versions of transformers and Pillow for servers and rollouts"
            )
