"""The learner computes the same logprobs as the vision-language model, in forests too, and detects images that were not recorded."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from agentrl.base.media import MediaFolder, normalized_image, open_png
from agentrl.errors import InfrastructureError, LearnerError
from agentrl.learner.causal_lm import load_model
from agentrl.learner.critic import ValueScorer
from agentrl.learner.packing import build_micro_batch, check_vocabulary, plan_micro_batches
from agentrl.learner.publish import select_probe_rows
from agentrl.learner.token_scorer import TokenScorer, check_scorer
from agentrl.records import Group, Sample
from agentrl.records.images import FIRST, image_ids, plain_ids
from agentrl.testing.tiny_vision import write_vision_model
from tests.learner.building import build_recipe, episode, scored, turn

CPU = torch.device("cpu")


class Run:
    """A run folder with a vision-language model, and token ids that contain images."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoProcessor

        base = folder / "versions" / "000000"
        self.reference = write_vision_model(base)
        self.processor, self.media = AutoProcessor.from_pretrained(base), MediaFolder(folder)
        self.lm = load_model(base, build_recipe(), CPU)

    def image(self, seed: int, size: tuple[int, int] = (40, 56)) -> tuple[int, ...]:
        values = torch.randint(256, (*size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).numpy()
        Image.fromarray(values).save(file := io.BytesIO(), "PNG")
        png = normalized_image(file.getvalue())
        ids = self.processor(text="<image>", images=[open_png(png)], add_special_tokens=False)["input_ids"][0]
        return image_ids(ids, self.media.put(png))

    def logprobs(self, ids: Sequence[int], *names: tuple[int, ...]) -> torch.Tensor:
        """[T-1] by the model's own forward pass over one plain sequence that shows these images."""
        images = [open_png(self.media.read(f"{block[0] >> 23:010x}")) for block in names]
        inputs = self.processor(text="<image>" * len(images), images=images, return_tensors="pt") if images else {}
        pixels = {name: value for name, value in inputs.items() if name.startswith("pixel")}
        plain = torch.tensor([plain_ids(ids)])
        logits = self.reference(input_ids=plain, **pixels).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, plain[0, 1:, None]).squeeze(-1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


def sample(ids: Sequence[int], trained: int = 3) -> Sample:
    count = len(ids)
    mask = (*(False,) * (count - trained), *(True,) * trained)
    row: dict[str, Any] = {"logprobs": (0.0,) * count, "advantages": (1.0,) * count, "versions": (0,) * count}
    return Sample(episode_id="e", group_index=0, token_ids=tuple(ids), loss_mask=mask, **row)


def score(lm: Any, samples: Sequence[Sample]) -> torch.Tensor:
    batch = build_micro_batch(tuple(samples), CPU)
    logprobs, _ = TokenScorer(lm)(batch.input_ids, batch.layout, batch.positions, batch.targets, 1.0)
    return logprobs[batch.expand]


@pytest.mark.slow
def test_a_forest_with_images_has_the_logprobs_of_plain_sequences(run: Run) -> None:
    """Sequences that share an image, that differ only in the image, with equal images in a row, with several sizes, and without any."""
    first, second, wide = run.image(1), run.image(2), run.image(3, (30, 112))
    assert plain_ids(first) == plain_ids(second) and len(wide) != len(first)
    sequences: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = [
        ((7, 8, *first, 9, 10, 11, 12), (first,)),
        ((7, 8, *first, 9, 10, 13, 14), (first,)),
        ((7, 8, *second, 9, 10, 11, 12), (second,)),
        ((7, *first, *first, 5, 6, 7, 8, *wide, 1, 2, 3), (first, first, wide)),
        ((7, 8, 9, 10, 11, 12), ()),
    ]
    samples = [sample(ids) for ids, _ in sequences]
    logprobs = score(run.lm, samples).view(len(samples), 3)
    for row, (ids, images) in zip(logprobs, sequences, strict=True):
        torch.testing.assert_close(row, run.logprobs(ids, *images)[-3:], rtol=0, atol=1e-4)
    assert (logprobs[0] - logprobs[2]).abs().max() > 1e-2, "the image matters"
    planned = [row for micro in plan_micro_batches(samples, rank=0, ranks=1, max_tokens=60) for row in micro]
    assert sorted(row.token_ids for row in planned) == sorted(row.token_ids for row in samples)
    check_scorer(TokenScorer(run.lm), tolerance=1e-3)
    check_vocabulary(samples, 288)
    with pytest.raises(LearnerError, match="token 300"):
        check_vocabulary([sample((*image_ids((300,), "ab" * 32), 1, 2, 3))], 288)


def test_an_image_token_that_the_policy_sampled_stays_a_token(run: Run) -> None:
    image = run.image(1)
    token = run.processor.image_token_id
    ids = (7, *image, 3, token, 5, token, 6)
    trunk = run.reference.model
    embedded = trunk.get_input_embeddings()(torch.tensor([plain_ids(ids)]))
    pixels = run.processor(text="<image>", images=[open_png(run.media.read(f"{image[0] >> 23:010x}"))], return_tensors="pt")
    features = trunk.get_image_features(pixels["pixel_values"], pixels["pixel_attention_mask"], return_dict=True).pooler_output
    positions = [at for at, number in enumerate(ids) if number >= FIRST and plain_ids([number]) == [token]]
    embedded[0, positions] = features.flatten(0, 1)
    hidden = trunk.text_model(inputs_embeds=embedded).last_hidden_state
    expected = run.reference.lm_head(hidden)[0, :-1].log_softmax(-1).gather(-1, torch.tensor(plain_ids(ids[1:]))[:, None])[-4:, 0]
    torch.testing.assert_close(score(run.lm, [sample(ids, 4)]), expected, rtol=0, atol=1e-4)


def test_an_image_trains_the_vision_tower_and_text_does_not(run: Run) -> None:
    def gradients_of(*ids: int) -> dict[str, bool]:
        run.lm.zero_grad()
        score(run.lm, [sample(ids)]).sum().backward()
        return {name: weight.grad is not None and bool(weight.grad.any()) for name, weight in run.lm.named_parameters()}

    reached = gradients_of(7, *run.image(1), 3, 5, 6)
    assert all(reached[name] for name in reached if not name.endswith("k_proj.bias")), [name for name in reached if not reached[name]]
    reached = gradients_of(7, 3, 5, 6, 8)
    assert {"vision" in name or "connector" in name for name in reached if not reached[name]} == {True}


def test_an_image_that_differs_from_the_recorded_one_raises(run: Run) -> None:
    """Another image under the recorded ids, other ids for the image, part of an image, and a missing image."""
    image, wide = run.image(1), run.image(3, (30, 112))
    other = tuple(token & (FIRST * 2 - 1) | wide[0] >> 23 << 23 for token in image)
    for block in (other, (*image[:3], image[3] + 1, *image[4:]), image[:-1]):
        with pytest.raises(LearnerError, match="differ from the recorded tokens"):
            score(run.lm, [sample((7, *block, 3, 5, 6))])
    with pytest.raises(InfrastructureError, match="missing"):
        score(run.lm, [sample((7, *image_ids(plain_ids(image), "cd" * 32), 3, 5, 6))])


def test_a_critic_reads_images(run: Run) -> None:
    scorer = ValueScorer(run.lm)
    torch.nn.init.normal_(scorer.head.weight)
    values = []
    for seed in (1, 2):
        batch = build_micro_batch((sample((7, *run.image(seed), 3, 5, 6)),), CPU)
        values.append(scorer(batch.input_ids, batch.layout, batch.positions))
    assert (values[0] - values[1]).abs().max() > 1e-3


def test_a_probe_row_never_starts_inside_an_image(run: Run) -> None:
    wide = run.image(3, (30, 112))
    prompt = [7, *wide, *range(10, 115)]
    group = Group(index=0, task_id="t", task_key="k", episodes=(scored(episode("e", [turn(prompt, [1, 2, 3], [0.0] * 3)]), 1.0),))
    (row,) = select_probe_rows((group,), vocabulary=288, max_model_len=1024, image_token=9)
    assert row == (*prompt, 1, 2, 3)
    (row,) = select_probe_rows((group,), vocabulary=288, max_model_len=120, image_token=9)
    assert row == (*range(10, 115), 1, 2, 3)
    sampled = scored(episode("e", [turn(prompt, [1, 124, 3], [0.0] * 3)]), 1.0)
    groups = (replace(group, episodes=(sampled, *group.episodes)),)
    assert select_probe_rows(groups, vocabulary=288, max_model_len=120, image_token=124) == (row,)


def test_ranks_without_images_compute_with_the_same_parameters(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks, all gradients exist on each of them, because the ranks sum them together."""
    alone = score(run.lm, [sample((7, 3, 5, 6, 8))]).detach()
    monkeypatch.setattr(torch, "distributed", SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 2))
    run.lm.zero_grad()
    logprobs = score(run.lm, [sample((7, 3, 5, 6, 8))])
    logprobs.sum().backward()
    torch.testing.assert_close(logprobs.detach(), alone)
    assert all(weight.grad is not None for weight in run.lm.parameters())
