from __future__ import annotations

from pathlib import Path

from agentrl.cluster.gpus import Placement
from agentrl.run.opening import policy_server
from agentrl.serving.replicas import ReplicatedPolicy
from agentrl.serving.served import ServedPolicy
from agentrl.version import FolderRegistry
from tests.driving import make_recipe


def test_a_run_gets_as_many_servers_as_its_recipe_says_each_with_its_gpu(tmp_path: Path) -> None:
    recipe, registry = make_recipe(), FolderRegistry(tmp_path / "versions")
    alone = policy_server(recipe, tmp_path, registry, Placement(server="3"))
    assert isinstance(alone, ServedPolicy) and (alone._gpus, alone._replica, alone.figures()) == ("3", None, {})
    several = policy_server(recipe.but("serving.replicas=3"), tmp_path, registry, Placement(replicas=("4", "5", "6")))
    assert isinstance(several, ReplicatedPolicy)
    assert [(one._gpus, one._replica) for one in several._replicas] == [("4", 0), ("5", 1), ("6", 2)]
