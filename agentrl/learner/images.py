"""Converts the images in token sequences to inputs for a vision-language model.

One call to the model's processor returns the pixels of a forest's images and the images' token ids. The ids must equal the recorded ids,
which the server expanded, so that the server and the learner compute with the same pixels. The features from the vision tower replace the
embeddings of the recorded image tokens only: an image token that the policy sampled remains a token.
"""

from __future__ import annotations

import inspect
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.base.media import MediaFolder, image_token, load_processor, open_png, process_images
from agentrl.errors import LearnerError
from agentrl.learner.forest import ForestLayout, build_forest
from agentrl.records.images import FIRST, NAME_DIGITS, image_blocks, image_ids

_SIZE = (96, 64)
_CHECKED = "f" * 64


class ImageInputs:
    """Converts a run's images for one model. `folder` contains the model and is in the run folder's `versions`."""

    def __init__(self, folder: Path, token: int) -> None:
        self.token, self._media = token, MediaFolder(folder.parent.parent)
        self._own: dict[str, Any] = {}  # the image that `largest_gap` uses
        self._processor = load_processor(folder)

    @classmethod
    def of(cls, lm: Any) -> ImageInputs | None:
        """Returns the image inputs for a loaded model, or None if the model reads only text."""
        folder = Path(lm.name_or_path)
        token = image_token(folder) if lm.name_or_path else None
        return None if token is None else cls(folder, token)

    def embeddings(self, trunk: Any, input_ids: Tensor) -> Tensor:
        """Returns the embeddings [1, T, H] of token ids [1, T] of a forest, with gradient. Raises `LearnerError` if the image tokens or
        features do not match the recorded tokens, and `InfrastructureError` if an image is missing or damaged."""
        ids = input_ids[0].tolist()
        blocks = list(image_blocks(ids))
        plain = input_ids & (FIRST - 1)
        embedded: Tensor = trunk.get_input_embeddings()(plain)
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if not blocks and not several:
            return embedded
        recorded = list(chain.from_iterable(plain[0, start:end].tolist() for start, end, _ in blocks))
        features = self._features(trunk, [name for *_, name in blocks], recorded, input_ids.device).to(embedded)
        if not blocks:  # other ranks may have images, and all must compute with the same parameters
            return embedded + 0.0 * features.sum()
        mask = (input_ids >= FIRST) & (plain == self.token)
        if mask.sum() != len(features):
            raise LearnerError(f"the model has {len(features)} features for {int(mask.sum())} image tokens: {_SAME}")
        return embedded.masked_scatter(mask[..., None], features)

    def _features(self, trunk: Any, names: list[str], recorded: list[int], device: torch.device) -> Tensor:
        """Returns the features [N, H] of the images in `names`, or those of a blank image if `names` is empty."""
        from PIL import Image

        images = [self._own.get(name) or open_png(self._media.read(name)) for name in names] or [Image.new("RGB", _SIZE, "white")]
        inputs = self._inputs(self._processor.image_token * len(images), images)
        if names and inputs["input_ids"][0].tolist() != recorded:
            raise LearnerError(
                f"the processor returns image tokens that differ from the recorded tokens ({', '.join(names)[:200]}): {_SAME}"
            )
        known = inspect.signature(trunk.get_image_features).parameters
        pixels = {name: value.to(device) for name, value in inputs.items() if name in known and isinstance(value, Tensor)}
        features = trunk.get_image_features(**pixels, return_dict=True).pooler_output
        parts = [features] if isinstance(features, Tensor) else features
        return torch.cat([part.flatten(0, -2) for part in parts])

    def _inputs(self, text: str, images: list[Any]) -> Any:
        return process_images(self._processor, text, images, return_tensors="pt")

    @torch.no_grad()
    def largest_gap(self, lm: Any) -> float:
        """Returns the largest difference between the logprobs computed by this module and by the model's own forward pass, for a text with
        an image."""
        from PIL import Image

        image = Image.effect_noise(_SIZE, 80.0).convert("RGB")
        inputs = self._inputs(f"a{self._processor.image_token}b", [image]).to(lm.device)
        ids, block = inputs["input_ids"], self._inputs(self._processor.image_token, [image])["input_ids"][0]
        start = next(at for at in range(ids.shape[1]) if ids[0, at : at + len(block)].tolist() == block.tolist())
        tagged = ids.clone()
        tagged[0, start : start + len(block)] = torch.tensor(image_ids(block.tolist(), _CHECKED), device=ids.device)
        self._own = {_CHECKED[:NAME_DIGITS]: image}
        states = run_trunk(lm, self, tagged, ForestLayout(build_forest([tagged[0].tolist()]), ids.device))
        own, reference = lm.get_output_embeddings()(states), lm(**inputs, use_cache=False).logits[0]
        self._own = {}
        gap: float = (own.double().log_softmax(-1) - reference.double().log_softmax(-1)).abs().max().item()
        return gap


_SAME = "use the same versions of transformers and Pillow for learner and rollouts"


def run_trunk(lm: Any, images: ImageInputs | None, input_ids: Tensor, layout: ForestLayout) -> Tensor:
    """Returns the last hidden states [T, H] of a forest. `lm`: a language model, or its trunk."""
    common = {"position_ids": layout.positions[None], "forest": layout, "use_cache": False}
    trunk = lm.base_model
    if images is None:
        states: Tensor = trunk(input_ids=input_ids, **common).last_hidden_state[0]
        return states
    states = trunk.get_decoder()(inputs_embeds=images.embeddings(trunk, input_ids), **common).last_hidden_state[0]
    return states
