from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import SwapError
from agentrl.serving import NcclWeightChannel
from tests.serving.scripted_server import Call
from tests.serving.test_swap import Engine, channel, publish, swap


class Learner(Engine):
    """An engine that a learner updates without the controller, a few polls after the pause."""

    polls = 0

    def __call__(self, call: Call) -> object:
        if call.path == "/weight_info":
            self.polls += 1
            self.version = "5" if self.polls == 3 else self.version
            return {"weight_version": self.version}
        if call.path == "/update_weight_version":
            self.version = call.body["new_version"]
        return super().__call__(call)


async def test_the_controller_keeps_the_pause_until_the_learner_has_sent(tmp_path: Path) -> None:
    version = publish(tmp_path, 5)
    async with channel(tmp_path, Learner(), kind=NcclWeightChannel) as (weight_channel, server, script):
        await swap(weight_channel, tmp_path, version)
        assert script.paths() == ["/pause", *["/weight_info"] * 3, "/resume", "/inference/v1/generate"]
        assert server.weights.number == 5


async def test_a_rejected_version_is_replaced_from_the_old_versions_folder(tmp_path: Path) -> None:
    engine = Learner()
    engine.logprobs = (-1.0, -9.0)
    version = publish(tmp_path, 5)
    async with channel(tmp_path, engine, kind=NcclWeightChannel) as (weight_channel, server, script):
        with pytest.raises(SwapError, match="7 nats"):
            await swap(weight_channel, tmp_path, version)
        reload = next(call for call in script.calls if call.path == "/collective_rpc")
        assert reload.body == {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "versions/0")}}
        assert (server.weights.number, engine.version, script.paths()[-1]) == (0, "0", "/resume")


@pytest.mark.slow
async def test_the_pause_ends_if_the_learner_never_sends(tmp_path: Path) -> None:
    version = publish(tmp_path, 6)
    async with channel(tmp_path, Learner(), kind=NcclWeightChannel) as (weight_channel, _, script):
        with pytest.raises(SwapError, match="did not finish within"):
            await swap(weight_channel, tmp_path, version, timeout_s=2.0)
        assert script.paths()[-1] == "/resume"
