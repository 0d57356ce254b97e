"""Third-party trackers: the Prometheus endpoint, and the packages wandb, trackio and MLflow, offline."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentrl.config import Part, Recipe, build
from agentrl.errors import PluginError, UserError
from agentrl.observe import Rate
from agentrl.observe.services import MAX_METRICS, PrometheusEndpoint, open_prometheus
from agentrl.observe.tracker import open_trackers
from tests.observe.test_tracker import group

ROOT = Path(__file__).resolve().parents[2]
RECIPE: Recipe = build({"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}})


def scrape(endpoint: PrometheusEndpoint) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urllib.request.urlopen(endpoint.url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        families = text_string_to_metric_families(answer.read().decode())
    samples = [row for family in families for row in family.samples]
    return {name: [(row.labels, row.value) for row in samples if row.name == name] for name in {row.name for row in samples}}


def test_the_endpoint_serves_the_newest_step_and_counts(tmp_path: Path) -> None:
    endpoint = open_prometheus(tmp_path, RECIPE, port=0)
    try:
        assert endpoint.url.startswith("http://127.0.0.1:")
        endpoint.stage("train", "2 steps")
        endpoint.progress(0, group(0))
        endpoint.alert("look")
        endpoint.log(1, {"loss": 2.0, "part/old": 1.0})
        endpoint.log(2, {"loss": 0.5, "part/a b": 0.25, "grad_norm": math.nan})
        endpoint.evaluated("after", {"heldout": Rate.from_successes(3, 4)})
        figures = scrape(endpoint)
    finally:
        endpoint.close()
    assert figures["agentrl_step"] == [({}, 2.0)] and figures["agentrl_loss"] == [({}, 0.5)]
    assert figures["agentrl_part_a_b"] == [({}, 0.25)] and "agentrl_part_old" not in figures
    assert math.isnan(figures["agentrl_grad_norm"][0][1])
    assert figures["agentrl_run_episodes_total"] == [({}, 2.0)] and figures["agentrl_run_episodes_excluded_total"] == [({}, 1.0)]
    assert figures["agentrl_run_alerts_total"] == [({}, 1.0)] and figures["agentrl_run_groups_total"] == [({}, 1.0)]
    assert figures["agentrl_stage"] == [({"stage": "train"}, 1.0)] and figures["agentrl_success"] == [({"split": "heldout"}, 0.75)]


def test_the_series_of_the_endpoint_are_bounded(tmp_path: Path) -> None:
    endpoint = open_prometheus(tmp_path, RECIPE, port=0)
    try:
        for step in range(5):
            endpoint.stage(f"stage {step}")
            endpoint.log(step, {f"part/{step}-{number}": 1.0 for number in range(2 * MAX_METRICS)})
        figures = scrape(endpoint)
    finally:
        endpoint.close()
    assert len(figures) <= MAX_METRICS + 5 and sum(map(len, figures.values())) <= MAX_METRICS + 5
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(endpoint.url, timeout=10)


def test_a_port_in_use_is_an_error_with_a_fix(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        recipe = RECIPE.but({"trackers": [Part("prometheus", options={"port": taken.getsockname()[1]})]})
        with pytest.raises(PluginError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            open_trackers(tmp_path, recipe, console=True)


@pytest.mark.parametrize("options", [{"prot": 0}, {"port": 0, "host": "0.0.0.0"}])
def test_wrong_options_are_an_error(tmp_path: Path, options: dict[str, Any]) -> None:
    recipe = RECIPE.but({"trackers": [Part("prometheus", options=options)]})
    with pytest.raises(PluginError, match=r"trackers 'prometheus' could not be opened: TypeError"):
        open_trackers(tmp_path, recipe, console=True)


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_the_error_for_a_missing_package_has_the_install_command(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"the tracker {name} needs the package {name}.*\n.*pip install .*{name}"):
        open_trackers(tmp_path, RECIPE.but({"trackers": [name]}), console=True)


MLFLOW_NEEDS = [
    *("cachetools==7.3.3", "cloudpickle==3.1.3", "databricks-sdk==0.162.0", "gitpython==3.2.1", "gitdb==4.0.12", "smmap==5.0.3"),
    *("google-auth==2.63.0", "importlib-metadata==9.1.0", "zipp==4.1.2", "sqlparse==0.6.1", "pyasn1==0.6.5", "pyasn1-modules==0.4.2"),
]
SITES = {
    "wandb": ["wandb==0.31.0", "platformdirs==4.14.8"],
    "trackio": ["trackio==0.43.0", "gradio-client==2.7.2", "orjson==3.13.0", "brotli==1.2.1"],
    "mlflow": ["mlflow-skinny==3.17.2", *MLFLOW_NEEDS],
}
"""Pinned packages that the tested environment lacks. They are installed into a separate folder, because MLflow and trackio need older
versions of packages that the environment has."""

DRIVER = """
import json, math, sys
from pathlib import Path
from agentrl.config import Part, build
from agentrl.observe.tracker import open_trackers
from agentrl.records import Episode, Group, Message, Score, ScoredEpisode, ToolCall, ToolResult, Trajectory, Turn
turn = Turn(prompt_ids=(), completion_ids=(), logprobs=(), versions=(), finish_reason="stop",
            message=Message(role="assistant", content="", tool_calls=(ToolCall(name="python", arguments={"code": "print(1)"}),)),
            tool_results=(ToolResult(name="python", output="1\\x1b[2J", ok=True),))
episode = Episode(id="g000000-0-a0", task_id="t", task_key="k", trajectories=(Trajectory(agent="main", turns=(turn,)),), wall_s=2.0)
scored = ScoredEpisode(episode=episode, score=Score(value=1.0))
prompt = (Message(role="user", content="How many?"),)
group = Group(index=0, task_id="t", task_key="k", episodes=(scored,) * 2, kind="count", prompt=prompt)
folder, name, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
recipe = build({"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}})
for steps in ([1, 2], [3]):  # the second one is a resumed run
    (tracker,) = open_trackers(folder, recipe.but({"trackers": [Part(name, options=options)]}), console=True)
    for step in steps:
        for index in range(9):
            tracker.progress(index, group)
        tracker.log(step, {"loss": 1.0 / step, "part/exact match": 0.5, "grad_norm": math.nan})
    tracker.alert("look at this")
    tracker.close()
    assert tracker.dropped == 0
print("{}")
"""


def written(name: str, options: dict[str, Any], tmp_path: Path, **variables: str) -> tuple[Path, dict[str, str]]:
    """Tracks two sessions of a run with the real package. Returns the run folder, and the environment in which it can be read back."""
    site, run = tmp_path / "site", tmp_path / "run"
    run.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(site), *SITES[name]]
    subprocess.run(install, check=True, timeout=300)
    environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "HOME": str(tmp_path), **variables}
    command = [sys.executable, "-c", DRIVER, str(run), name, json.dumps(options)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    assert result.stdout == "{}\n", "standard output is for the result of the run"
    return run, environment


def read_back(code: str, environment: dict[str, str], *arguments: str) -> Any:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_wandb_writes_its_files_offline_and_a_resumed_run_has_the_same_id(tmp_path: Path) -> None:
    run, environment = written("wandb", {"project": "p", "mode": "offline"}, tmp_path, WANDB_SILENT="true")
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    (number,) = {path.stem.removeprefix("run-") for path in files}
    assert json.loads((run / "trackers.json").read_text()) == {"wandb": number}
    records = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2 as pb
def stored(data, block=32768):  # the log format of LevelDB, after seven bytes: crc32, length and type of each part of a record
    at, whole = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at:at + 7])
        whole, at = whole + data[at + 7:at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""
lines = []
for path in sys.argv[1:]:
    for data in stored(Path(path).read_bytes()):
        record = pb.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            lines.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
tables = [json.loads(path.read_text()) for path in sorted(Path(sys.argv[1]).parent.parent.rglob("*.table.json"))]
print(json.dumps([lines, tables]))
"""
    lines, tables = read_back(records, environment, *map(str, files))
    assert tables and all(table["columns"][0] == "episode" and len(table["data"]) == 4 for table in tables)
    row = dict(zip(tables[0]["columns"], tables[0]["data"][0], strict=True))
    assert (row["episode"], row["kind"], row["score"], row["seconds"]) == ("g000000-0-a0", "count", 1.0, 2.0)
    transcript = '[user]\nHow many?\n[assistant]\npython {"code": "print(1)"}\n[tool]\n1\ufffd[2J'
    assert row["transcript"] == transcript
    assert [(line["_step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert {line["part/exact match"] for line in lines} == {0.5}


@pytest.mark.slow
def test_trackio_writes_its_database_and_a_resumed_run_continues(tmp_path: Path) -> None:
    run, environment = written("trackio", {"project": "p"}, tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    code = """
import json
from trackio.sqlite_storage import SQLiteStorage
names = SQLiteStorage.get_runs("p")
traces = [SQLiteStorage.get_traces("p", run=name) for name in names]
print(json.dumps([[name, SQLiteStorage.get_logs("p", name), trace] for name, trace in zip(names, traces)], default=str))
"""
    ((name, lines, traces),) = read_back(code, environment)
    assert len(traces) == 3 * 4, "four episodes of each step"
    messages = traces[0]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] and messages[2]["content"] == "1\ufffd[2J"
    assert name == f"run-{json.loads((run / 'trackers.json').read_text())['trackio']}"
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]


@pytest.mark.slow
def test_mlflow_writes_its_store_and_a_resumed_run_continues(tmp_path: Path) -> None:
    uri = (tmp_path / "store").as_uri()
    run, environment = written("mlflow", {"experiment": "e", "tracking_uri": uri}, tmp_path, MLFLOW_ALLOW_FILE_STORE="true")
    code = """
import json, sys
import mlflow
client = mlflow.MlflowClient(tracking_uri=sys.argv[1])
number = client.get_experiment_by_name("e").experiment_id
runs = client.search_runs([number])
loss = client.get_metric_history(runs[0].info.run_id, "loss")
print(json.dumps({"ids": [run.info.run_id for run in runs], "status": runs[0].info.status, "alerts": runs[0].data.tags["alert"],
                  "part": runs[0].data.metrics["part/exact match"], "loss": [[one.step, one.value] for one in loss]}))
"""
    read = read_back(code, environment, uri)
    assert read["ids"] == [json.loads((run / "trackers.json").read_text())["mlflow"]] and read["status"] == "FINISHED"
    assert read["loss"] == [[1, 1.0], [2, 0.5], [3, pytest.approx(1 / 3)]] and read["part"] == 0.5 and read["alerts"] == "look at this"
