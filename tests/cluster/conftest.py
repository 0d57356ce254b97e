"""One Ray cluster for the tests of this folder that need no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import ray_nodes as nodes
from tests.cluster.ray_nodes import RayNodes


@pytest.fixture(scope="package")
def ray_nodes() -> Iterator[RayNodes]:
    """A head and one node with two cores."""
    with nodes.running() as cluster:
        cluster.add()
        yield cluster
