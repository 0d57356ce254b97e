"""The whole loop with adapters: swapped, restored in restarted servers, evaluated by the gate's own server, exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.experience import SqliteStore
from agentrl.failure.case import Case, save_case
from agentrl.gate.verdict import GateOutcome, read_verdicts
from agentrl.records import Split, VersionState
from agentrl.version import FolderRegistry
from sandboxes.tables import Tables
from tests.ledgers import consumed, indices

from .conftest import SMALL, descendants, start, steps_logged, summary, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.bubblewrap]

RECIPE = "recipes/quickstart_lora.py"


@pytest.mark.usefixtures("nothing_left")
def test_a_lora_run_survives_dead_servers_and_uses_the_gates_own_server(tmp_path: Path, forked: tuple[str, ...]) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, suite = tmp_path / "run", tmp_path / "suite"
    for number in range(4):
        save_case(suite, Case(id=f"case-{number}", task=Tables(seed=11).task(Split.HELDOUT, number)))
    gate = [f"gate.suite={json.dumps(str(suite))}", "gate.server=own", "gate.repeats=2"]
    process = start(
        "train",
        RECIPE,
        "steps=3",
        *SMALL,
        "rollout.extra_groups=2",
        "order=in_order",
        *gate,
        "--run-dir",
        str(run),
        "--sandbox",
        "bubblewrap",
        by=forked,
    )
    try:
        wait_for(lambda: 1 in steps_logged(run), process, timeout=600)
        for server in descendants(process, "agentrl.serving.launch"):
            server.kill()
        output, _ = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    result = summary(run)
    assert result["finished"] and (result["steps"], result["weight_swaps"]) == (3, 3)
    assert result["swap_probe_max_abs_diff"] <= 1e-3
    output_text = " ".join(output.split())
    assert "the inference server is replaced" in output_text and "inference server gate is replaced" in output_text
    verdicts = read_verdicts(run)
    assert [verdict.version for verdict in verdicts] == [0, 1, 2, 3] and verdicts[0].outcome is GateOutcome.REFERENCE
    assert verdicts[0].figures is not None and verdicts[0].figures.attempts == 8 and verdicts[0].figures.unscored == 0
    assert {verdict.outcome for verdict in verdicts[1:]} == {GateOutcome.PROMOTED}, [verdict.reason for verdict in verdicts]
    assert FolderRegistry(run / "versions").latest(VersionState.PROMOTED).number == 3
    lines = {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "episodes" in line}
    for line in lines.values():  # up to two more groups for those without a preference
        assert line["groups_extra"] == line["episodes"] / 4 - 4 == min(2, line["groups_without_signal"])
    store = SqliteStore(run / "experience.sqlite")
    assert set(consumed(store)) == set(indices(store)), "every group was consumed, although the server died"
    store.close()
    for number in (1, 2, 3):
        version = run / f"versions/{number:06d}"
        assert {path.name for path in version.glob("*.safetensors")} == {"adapter_model.safetensors"}
        assert (version / "adapter_model.safetensors").stat().st_size < 0.1 * (run / "versions/000000/model.safetensors").stat().st_size
        assert json.loads((version / "version.json").read_text())["weights"] == "adapter_model.safetensors"

    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run / "versions/000000", run / "model"))
    assert {path.name for path in (run / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "probe.json"}
    ids = torch.arange(50)[None]
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, run / "adapter")(ids).logits
        assert (merged(ids).logits - after).abs().max() < 1e-3
        assert (before - after).abs().max() > 1e-3
