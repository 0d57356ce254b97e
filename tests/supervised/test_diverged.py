"""A training that blows up leaves no model behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.supervised import select_demonstrations
from agentrl.testing.tiny_model import VOCABULARY, make_model, write_version
from tests.supervised.test_tune import groups

pytestmark = pytest.mark.slow


def test_a_diverged_training_raises_and_writes_nothing(tmp_path: Path) -> None:
    from agentrl.supervised.tune import train_sft

    write_version(tmp_path, 0, make_model(0, vocabulary=VOCABULARY))
    base = next(path.parent for path in tmp_path.rglob("config.json"))
    with pytest.raises(UserError, match=r"diverged.*\n.*lower --lr"):
        train_sft(select_demonstrations(groups()), base, tmp_path / "out", epochs=3, lr=1e30, batch=8, seed=0)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
