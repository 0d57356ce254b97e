"""Creates a tiny vision-language model with SmolVLM's architecture (Idefics3) and random weights, for tests with a vLLM server.

torch and transformers are imported inside the functions, so that collecting tests stays fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.testing.policies import byte_tokenizer
from agentrl.testing.tiny_model import VOCABULARY

if TYPE_CHECKING:
    from transformers import Idefics3ForConditionalGeneration

SIDE = 56
"""Side length of an image in pixels. A larger image is shown in up to four parts of this size, and also as a complete image."""
_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
_PARTS = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]


def write_vision_model(folder: Path, seed: int = 0) -> Idefics3ForConditionalGeneration:
    """Writes a model, its tokenizer and its processor to a folder, and returns the model."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, LlamaConfig
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = byte_tokenizer(*_TOKENS, *_PARTS)
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**sizes, "image_size": SIDE, "patch_size": SIDE // 4, "initializer_range": 0.15}
    ids = {"image_token_id": image_token, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(Idefics3Config(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids))
    torch.nn.init.normal_(model.model.connector.modality_projection.proj.weight, std=0.3)
    model.float().eval().save_pretrained(folder)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(folder)
    return model
