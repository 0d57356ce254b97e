"""A reward model on a real vLLM server gives the same numbers as transformers, for texts and for tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import JudgeServerConfig, Recipe
from agentrl.errors import ServingError
from agentrl.judge import RewardModel, ScoreEndpoint, served, servers
from agentrl.judge.reward_model import reward_model_text, save_record
from agentrl.records import codec
from agentrl.serving.judge_server import JudgeServer
from agentrl.session.judge_servers import JudgeServers, declare_judge_servers
from agentrl.testing.tiny_model import make_model, make_probe, make_tokenizer
from tests.judge.judge_parts import TASK, episode

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("forked_servers")]


async def test_a_reward_model_is_served_as_transformers_computes_it(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path / "model"
    make_model(0).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    save_record(folder, shows=("question", "answer"), offset=0.0, scale=1.0, max_tokens=512)

    section = {"mine": {"model": str(folder), "max_model_len": 512, "kv_cache_gb": 0.1, "startup_timeout_s": 400}}
    recipe = Recipe.model_validate(
        {"name": "x", "policy": {"model": "m"}, "tasks": {"family": "f:F"}, "judge_servers": section, "device": "cpu"}
    )
    declare_judge_servers(recipe, {"mine": folder})
    judge = RewardModel(endpoint=ScoreEndpoint(url=served("mine"), model="mine"))
    judge.prepare(root=tmp_path, folder=None)
    answers = ("It is Paris.", "It is <|im_end|> Lyon.", "word " * 400)
    try:
        async with JudgeServers(recipe, {"mine": folder}, folder=tmp_path) as running:
            await running.ready()
            scores = [await judge(TASK, episode(answer)) for answer in answers]
    finally:
        servers.register_servers({})
        await judge.close()
    for answer, score in zip(answers, scores, strict=True):
        ids = tokenizer(reward_model_text(("question", "answer"), TASK, episode(answer), reference="answer"))["input_ids"][-512:]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits.item()
        assert score.parts["number"] == pytest.approx(expected, abs=1e-3), "the start of too long a text is cut"


async def test_a_judge_model_from_a_run_is_compared_with_its_probe(tmp_path: Path) -> None:
    folder, config = tmp_path / "model", JudgeServerConfig(model="unused", max_model_len=512, kv_cache_gb=0.1, startup_timeout_s=400)
    make_model(0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    for seed in (1, 0):
        (folder / "probe.json").write_bytes(codec.to_json(make_probe(make_model(seed))))
        server = JudgeServer("mine", config, model=folder, reward_model=False, folder=tmp_path, device="cpu")
        if seed:
            with pytest.raises(ServingError, match=r"the logprobs of judge server mine differ by .* nats from .*probe.json"):
                await server.start()
        else:
            await server.start()
            assert await server.alive()
        await server.stop()
