"""TRL's trainers on exact tokens: each moves the model towards its data."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers

from agentrl.errors import UserError
from agentrl.judge.labels import TextPreference
from agentrl.judge.reward_model import load_record
from agentrl.records import Group
from agentrl.supervised import select_demonstrations, select_preferences
from agentrl.testing.tiny_model import VOCABULARY, make_model, write_version
from tests.learner.building import episode, scored, turn

pytestmark = pytest.mark.slow
GOOD, BAD = [7, 7, 7], [8, 8, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    write_version(root, 0, make_model(0, vocabulary=VOCABULARY))
    return next(path.parent for path in root.rglob("config.json"))


def groups() -> list[Group]:
    rng = random.Random(0)
    built = []
    for index in range(24):
        prompt = [rng.randrange(10, 200) for _ in range(6)]
        attempts = [
            scored(episode(f"{index}-{value}", [turn(prompt, completion, [-5.0] * 3), turn([30, 31], [40], [-5.0])]), value)
            for completion, value in ((GOOD, 1.0), (BAD, 0.0))
        ]
        built.append(Group(index=index, task_id=f"t{index}", task_key=f"k{index}", episodes=tuple(attempts)))
    return built


def preference(folder: Path) -> float:
    """Returns how much likelier the good completion is than the bad one, in nats, after a prompt that is in no group."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = [201, 202, 203]
    log_probs = []
    for completion in (GOOD, BAD):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            logp = lm(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        log_probs.append(logp[len(prompt) - 1 :].sum().item())
    return log_probs[0] - log_probs[1]


def test_imitation_raises_the_probability_of_good_completions(model: Path, tmp_path: Path) -> None:
    from agentrl.supervised.tune import train_sft

    rows = select_demonstrations(groups())
    train_sft(rows, model, tmp_path / "out", epochs=8, lr=3e-3, batch=8, seed=0)
    assert preference(tmp_path / "out") > preference(model) + 2
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert not list(tmp_path.glob(".*part"))
    with pytest.raises(UserError, match="does not contain an episode"):
        train_sft([], model, tmp_path / "none", epochs=1, lr=1e-3, batch=8, seed=0)


def test_direct_preference_optimization_excludes_tool_output(model: Path, tmp_path: Path) -> None:
    from agentrl.supervised.tune import _masked_collator, train_dpo

    pairs = select_preferences(groups())
    loss = train_dpo(pairs, model, tmp_path / "out", beta=0.1, epochs=6, lr=1e-3, batch=8, seed=0)
    assert loss < 0.6 and preference(tmp_path / "out") > preference(model) + 1
    row = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6], "chosen_mask": [1, 0, 1], "rejected_mask": [1]}
    assert _masked_collator(0)([row])["completion_mask"].tolist() == [[0, 0, 1, 0, 1], [0, 0, 1, 0, 0]]


def test_a_reward_model_scores_good_completions_higher(model: Path, tmp_path: Path) -> None:
    from agentrl.supervised.tune import train_reward_model

    train_reward_model(select_preferences(groups()), model, tmp_path / "out", epochs=8, lr=1e-3, batch=8, seed=0)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    prompt = [201, 202, 203]
    with torch.no_grad():
        scores = [judge(torch.tensor([prompt + completion + [30, 31, 40]])).logits.item() for completion in (GOOD, BAD)]
    assert scores[0] > scores[1] + 0.5
    record = load_record(tmp_path / "out")
    assert record.shows == () and record.value(scores[0]) > 0.5 > record.value(scores[1])
    texts = [TextPreference(chosen=f"answer {number}: yes", rejected=f"answer {number}: no") for number in range(24)]
    train_reward_model(texts, model, tmp_path / "text", epochs=8, lr=1e-3, batch=8, seed=0, shows=("answer",))
    assert load_record(tmp_path / "text").shows == ("answer",)
    model_of_texts, tokenizer = (
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "text"),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "text"),
    )
    with torch.no_grad():
        yes, no = (model_of_texts(**tokenizer(f"answer 99: {word}", return_tensors="pt")).logits.item() for word in ("yes", "no"))
    assert load_record(tmp_path / "text").value(yes) > 0.5 > load_record(tmp_path / "text").value(no)


def test_a_reward_model_that_separates_no_pair_raises_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    from agentrl.supervised.tune import train_reward_model

    texts = [TextPreference(chosen="answer: yes", rejected="answer: yes")] * 4
    with pytest.raises(UserError, match="does not score the better attempt"):
        train_reward_model(texts, model, tmp_path / "out", epochs=1, lr=1e-3, batch=4, seed=0, shows=("answer",))
    assert not list(tmp_path.iterdir())


def test_a_diverged_training_raises_and_writes_nothing(model: Path, tmp_path: Path) -> None:
    from agentrl.supervised.tune import train_sft

    with pytest.raises(UserError, match=r"diverged.*\n.*lower --lr"):
        train_sft(select_demonstrations(groups()), model, tmp_path / "out", epochs=3, lr=1e30, batch=8, seed=0)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
