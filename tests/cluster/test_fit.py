from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.cluster.fit import ClusterNode, describe_nodes, describe_plan, fit_plan, no_fit_error
from agentrl.cluster.plan import GIB, Bundle, ClusterPlan, PlannedPart
from tests.strategies import examples


def node(name: str, cpus: float = 8, gpus: float = 0, memory: float = 64, **labels: str) -> ClusterNode:
    total = {"CPU": cpus, "GPU": gpus, "memory": memory * GIB}
    return ClusterNode(name=name, total=total, free=total, labels=labels)


def part(name: str, count: int, cpus: float = 1, gpus: float = 0, memory: float = 1, **labels: str) -> PlannedPart:
    return PlannedPart(name=name, count=count, bundle=Bundle(name=name, cpus=cpus, gpus=gpus, memory=int(memory * GIB), labels=labels))


def plan(*parts: PlannedPart) -> ClusterPlan:
    driver = PlannedPart(name="driver", count=1, bundle=Bundle(name="driver", cpus=99), with_driver=True)
    return ClusterPlan(parts=(driver, *parts), address="head:6379")


def is_valid(cluster_plan: ClusterPlan, nodes: Sequence[ClusterNode], assignment: dict[str, str]) -> bool:
    """Whether an assignment has every bundle on a node with its labels and enough of every resource."""
    used: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    by_name = {item.name: item for item in nodes}
    for bundle in cluster_plan.bundles():
        chosen = by_name[assignment[bundle.name]]
        if not chosen.has_labels(bundle.labels):
            return False
        for resource, amount in bundle.amounts().items():
            used[chosen.name][resource] += amount
    return all(amount <= by_name[name].total[resource] + 1e-3 for name, sums in used.items() for resource, amount in sums.items())


AMOUNTS = st.tuples(
    st.sampled_from([0.5, 1, 2, 3]), st.sampled_from([0, 0, 0.5, 1, 2]), st.sampled_from([0, 1, 3]), st.sampled_from(["", "a"])
)
PARTS = st.lists(st.tuples(st.integers(1, 2), AMOUNTS), min_size=1, max_size=3)
NODES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 4), st.sampled_from(["", "a"])), min_size=0, max_size=3)


@settings(max_examples=examples(200))
@given(PARTS, NODES)
def test_an_assignment_is_valid_and_an_impossible_plan_has_none(
    parts: list[tuple[int, tuple[float, float, float, str]]], nodes: list[tuple[int, int, int, str]]
) -> None:
    """Compares the result with every possible assignment."""
    cluster_plan = plan(*(part(f"p{index}", count, *amounts[:3], zone=amounts[3]) for index, (count, amounts) in enumerate(parts)))
    existing = [node(f"n{index}", *amounts[:3], zone=amounts[3]) for index, amounts in enumerate(nodes)]
    fit = fit_plan(cluster_plan, existing)
    names = [bundle.name for bundle in cluster_plan.bundles()]
    if fit.assignment is not None:
        assert is_valid(cluster_plan, existing, dict(fit.assignment)) and not fit.is_impossible
    elif fit.is_impossible:
        candidates = itertools.product([item.name for item in existing], repeat=len(names))
        assert not any(is_valid(cluster_plan, existing, dict(zip(names, chosen, strict=True))) for chosen in candidates)


def test_an_impossible_plan_is_shown_next_to_the_nodes() -> None:
    cluster_plan, nodes = plan(part("server", 3, gpus=1), part("worker", 2)), [node("gpu-a", gpus=1), node("gpu-b", gpus=1)]
    fit = fit_plan(cluster_plan, nodes)
    assert fit.problems == ("3 x server (1 CPU, 1 GPU, 1.0 GiB of memory): room for 2",)
    text = str(no_fit_error(cluster_plan, nodes, fit.problems))
    assert "does not fit the cluster at head:6379" in text and "lower serving.replicas, or set what a part reserves" in text
    assert "server  3      1     1     1.0 GiB  a node" in text and "gpu-b  8     1     64.0 GiB" in text


def test_parts_that_fit_alone_and_not_together_are_a_problem() -> None:
    fit = fit_plan(plan(part("server", 1, cpus=5), part("learner", 1, cpus=5)), [node("a")])
    assert fit.problems == ("all parts together need 10 CPU; the cluster has 8 CPU",)


def test_a_label_that_no_node_has_is_a_problem() -> None:
    fit = fit_plan(plan(part("server", 1, pool="h100")), [node("a", pool="a100")])
    assert fit.problems == ("1 x server (1 CPU, 1.0 GiB of memory, pool=h100): room for 0",)


def test_reservations_of_other_jobs_count_only_for_the_present() -> None:
    busy = ClusterNode(name="a", total={"CPU": 8, "memory": 64 * GIB}, free={"CPU": 0.5, "memory": 64 * GIB})
    cluster_plan = plan(part("server", 1))
    assert fit_plan(cluster_plan, [busy]).assignment == {"server": "a"} and fit_plan(cluster_plan, [busy], now=True).is_impossible
    assert "8 (0.5 free)" in describe_nodes([busy])


def test_thousands_of_parts_are_assigned_to_nodes_in_order_of_their_needs() -> None:
    cluster_plan = plan(part("worker", 500), part("server", 64, gpus=1, cpus=4))
    nodes = [
        *(node(f"gpu-{number}", cpus=32, gpus=8) for number in range(8)),
        *(node(f"cpu-{number}", cpus=64, memory=256) for number in range(8)),
    ]
    fit = fit_plan(cluster_plan, nodes)
    assert fit.assignment is not None and is_valid(cluster_plan, nodes, dict(fit.assignment))
    text = describe_plan(cluster_plan, fit.assignment)
    assert "cpu-0, cpu-1, cpu-2, cpu-3 and 4 more" in text and "where the command runs" in text


@pytest.mark.parametrize("count", [0, 41])
def test_any_number_of_nodes_is_shown(count: int) -> None:
    text = describe_nodes([node(f"n{number}\x1b[31m") for number in range(count)])
    assert text.startswith("node") and ("and 1 more nodes" in text) == (count == 41) and "\x1b" not in text
