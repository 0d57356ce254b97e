"""Trackers for third-party services: wandb, trackio, MLflow and Prometheus. A recipe selects trackers by name.

The package of a tracker is imported only if a recipe names the tracker. The options of the trackers `wandb` and `trackio` include those of
the package, such as `project` and `mode` for wandb. Environment variables of the packages, such as WANDB_API_KEY, TRACKIO_DIR and
MLFLOW_TRACKING_URI, have their normal effect. A resumed run continues the same run in the service. The id of that run is stored in
`trackers.json` in the run folder.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from agentrl.base.files import write_atomically
from agentrl.base.installation import import_optional
from agentrl.base.user_code import printable
from agentrl.config.recipe import Recipe
from agentrl.errors import PluginError
from agentrl.observe.samples import Sample, Samples
from agentrl.protocols import Interval, Tracker
from agentrl.records import Group

IDS_FILE = "trackers.json"
MAX_METRICS = 512
"""Maximum number of metrics per step that the Prometheus endpoint exposes."""
SAMPLES = 4
"""Default number of episodes per step that are sent to wandb and trackio."""
_MAX_TEXT = 2000  # maximum number of characters in an alert
_TITLE = "agentrl"
_LOOPBACK = "127.0.0.1"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


Show = Callable[[Sequence[Sample]], Any]
"""A function that converts samples to a value that the service's `log` accepts."""


class ExperimentRun(Tracker):
    """A run in wandb or trackio, which have the same interface: the methods `log`, `alert` and `finish` of the object that `init` returns.

    Args:
        show: converts the sampled episodes of a step to the value that is logged under the key `episodes`.
        samples: maximum number of episodes logged per step; 0 logs none.
    """

    def __init__(self, run: Any, show: Show, *, samples: int) -> None:
        self._run, self._show, self._samples = run, show, Samples(samples)

    def progress(self, index: int, group: Group) -> None:
        """Adds a sample of a finished group to the samples for the next step."""
        self._samples.add(group)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a finished step, with the episodes sampled since the previous step."""
        samples = self._samples.take()
        self._run.log(dict(metrics) | ({"episodes": self._show(samples)} if samples else {}), step=step)

    def alert(self, text: str) -> None:
        """Sends an alert through the service."""
        with redirect_stdout(sys.stderr):  # trackio prints the alert, but standard output may be the run's JSON
            self._run.alert(title=_TITLE, text=printable(text, _MAX_TEXT))

    def close(self) -> None:
        """Finishes the run in the service."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


def open_wandb(run_dir: Path, recipe: Recipe, *, samples: int = SAMPLES, **options: Any) -> ExperimentRun:
    """Opens the tracker `wandb`: `samples` episodes per step are logged in a table. `options` are passed to `wandb.init`.

    Raises `UserError` if wandb is not installed.
    """
    wandb = import_optional("wandb", "wandb", needed_for="the tracker wandb")
    number = stored_id(run_dir, "wandb")
    usual = {"project": _TITLE, "name": run_dir.name, "id": number, "resume": "allow", "dir": str(run_dir), "config": _config(recipe)}

    def show(samples: Sequence[Sample]) -> Any:
        rows = [[*sample.facts.values(), sample.text()] for sample in samples]
        return wandb.Table(columns=[*samples[0].facts, "transcript"], data=rows)

    return ExperimentRun(wandb.init(**usual | options), show, samples=samples)


def open_trackio(run_dir: Path, recipe: Recipe, *, samples: int = SAMPLES, **options: Any) -> ExperimentRun:
    """Opens the tracker `trackio`: `samples` episodes per step are logged as traces. `options` are passed to `trackio.init`.

    Raises `UserError` if trackio is not installed.
    """
    trackio = import_optional("trackio", "trackio", needed_for="the tracker trackio")
    name = f"{run_dir.name}-{stored_id(run_dir, 'trackio')}"  # trackio identifies a run by its name
    usual = {"project": _TITLE, "name": name, "resume": "allow", "config": _config(recipe), "auto_log_gpu": False, "auto_log_cpu": False}

    def show(samples: Sequence[Sample]) -> Any:
        return [
            trackio.Trace(messages=list(sample.messages), metadata=sample.facts | {"duration_ms": 1000 * sample.seconds})
            for sample in samples
        ]

    with redirect_stdout(sys.stderr):
        return ExperimentRun(trackio.init(**usual | options), show, samples=samples)


class MlflowRun(Tracker):
    """A run in MLflow, which is updated through an `MlflowClient`."""

    def __init__(self, mlflow: Any, client: Any, run_id: str) -> None:
        self._mlflow, self._client, self._run_id = mlflow, client, run_id
        self._alerts = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a finished step, without those that are not finite."""
        now_ms = self._mlflow.utils.time.get_current_time_millis()
        entity = self._mlflow.entities.Metric
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        self._client.log_batch(self._run_id, metrics=[entity(_mlflow_name(key), value, now_ms, step) for key, value in finite.items()])

    def alert(self, text: str) -> None:
        """Sets the tag `alert` to the newest alert, and the tag `alerts` to the number of alerts since this driver started."""
        self._alerts += 1
        self._client.set_tag(self._run_id, "alert", printable(text, _MAX_TEXT))
        self._client.set_tag(self._run_id, "alerts", str(self._alerts))

    def close(self) -> None:
        """Marks the run as finished in MLflow."""
        self._client.set_terminated(self._run_id)


def open_mlflow(run_dir: Path, recipe: Recipe, *, experiment: str = _TITLE, tracking_uri: str | None = None) -> MlflowRun:
    """Opens the tracker `mlflow`. If `tracking_uri` is None, MLFLOW_TRACKING_URI is used. Raises `UserError` if MLflow is not installed."""
    mlflow = import_optional("mlflow", "mlflow", needed_for="the tracker mlflow")
    client = mlflow.MlflowClient(tracking_uri=tracking_uri)
    run_id = _read_ids(run_dir).get("mlflow")
    if run_id is None:
        known = client.get_experiment_by_name(experiment)
        number = client.create_experiment(experiment) if known is None else known.experiment_id
        run_id = client.create_run(number, run_name=run_dir.name).info.run_id
        _write_id(run_dir, "mlflow", run_id)
        client.log_dict(run_id, _config(recipe), "recipe.json")
    else:
        client.update_run(run_id, status="RUNNING")
    return MlflowRun(mlflow, client, run_id)


class PrometheusEndpoint(Tracker):
    """Serves the metrics of the newest step and the counters of the run at http://127.0.0.1:PORT/metrics, in the Prometheus text format.

    A step's metric `part/x` becomes the gauge `agentrl_part_x`. Only two metrics have labels: `agentrl_stage`, with one series, and
    `agentrl_success`, with one series per split. The endpoint has no authentication and listens only on the loopback interface.
    """

    def __init__(self, prometheus: Any, port: int) -> None:
        self._families = prometheus.core
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        self._counts = dict.fromkeys(("alerts", "groups", "episodes", "episodes_excluded"), 0)
        self._stage = ""
        registry = prometheus.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus.start_http_server(port, addr=_LOOPBACK, registry=registry)
        except OSError as error:
            problem = f"tracker prometheus cannot listen on {_LOOPBACK}:{port}: {error.strerror or error}"
            raise PluginError(problem, fix="set a different port in its options, or stop the program that uses this port") from None
        self.url = f"http://{_LOOPBACK}:{self._server.server_port}/metrics"

    def collect(self) -> Iterator[Any]:
        """Yields the metric families. The Prometheus client calls it at each scrape, on a thread of the HTTP server."""
        with self._lock:
            metrics, rates, counts, stage = dict(self._metrics), dict(self._rates), dict(self._counts), self._stage
        for name, value in metrics.items():
            yield self._families.GaugeMetricFamily(f"agentrl_{name}", "Metric of the newest step.", value=value)
        for name, count in counts.items():
            yield self._families.CounterMetricFamily(f"agentrl_run_{name}", "Count since this driver started.", value=count)
        yield self._gauge("agentrl_stage", "The stage of the run.", "stage", {stage: 1.0} if stage else {})
        yield self._gauge("agentrl_success", "Mean score of the newest evaluation.", "split", rates)

    def _gauge(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Any:
        family = self._families.GaugeMetricFamily(name, text, labels=[label])
        for key, value in values.items():
            family.add_metric([key], value)
        return family

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replaces the metrics of the previous step with those of this step, at most `MAX_METRICS`."""
        named = {"step": float(step)} | {_NOT_IN_NAMES.sub("_", key)[:200]: float(value) for key, value in metrics.items()}
        with self._lock:
            self._metrics = dict(list(named.items())[:MAX_METRICS])

    def alert(self, text: str) -> None:
        """Counts an alert."""
        self._count(alerts=1)

    def stage(self, name: str, detail: str = "") -> None:
        """Sets the current stage."""
        with self._lock:
            self._stage = name

    def progress(self, index: int, group: Group) -> None:
        """Counts a finished group."""
        self._count(groups=1, episodes=len(group.episodes), episodes_excluded=len(group.episodes) - len(group.scored))

    def evaluated(self, phase: str, rates: Mapping[str, Interval]) -> None:
        """Replaces the success rates of the evaluated splits."""
        with self._lock:
            self._rates |= {split: rate.value for split, rate in rates.items()}

    def close(self) -> None:
        """Stops the server. Idempotent."""
        self._server.shutdown()
        self._server.server_close()

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count


def open_prometheus(run_dir: Path, recipe: Recipe, *, port: int = 9464) -> PrometheusEndpoint:
    """Opens the tracker `prometheus`. Port 0 selects a free port.

    Raises `UserError` if `prometheus_client` is not installed, and `PluginError` if the endpoint cannot listen on the port.
    """
    import_optional("prometheus_client", "prometheus", needed_for="the tracker prometheus")
    import prometheus_client
    import prometheus_client.core

    return PrometheusEndpoint(prometheus_client, port)


def _config(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe as JSON data, which contains references to secrets but not their values."""
    return recipe.model_dump(mode="json")


def _mlflow_name(key: str) -> str:
    """Returns the name of a metric, with `_` in place of characters that MLflow does not allow, and limited in length."""
    return re.sub(r"[^\w./ -]", "_", key, flags=re.ASCII)[:250]


def _read_ids(run_dir: Path) -> dict[str, str]:
    """Returns a mapping tracker -> id of the run in the tracker's service; empty if `trackers.json` is missing or damaged."""
    try:
        ids = json.loads((run_dir / IDS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in ids.items()} if isinstance(ids, dict) else {}


def _write_id(run_dir: Path, tracker: str, number: str) -> None:
    write_atomically(run_dir / IDS_FILE, json.dumps(_read_ids(run_dir) | {tracker: number}, indent=1) + "\n")


def stored_id(run_dir: Path, tracker: str) -> str:
    """Returns the id of the run in a tracker's service. On first use, creates and stores the id."""
    number = _read_ids(run_dir).get(tracker) or uuid.uuid4().hex[:12]
    _write_id(run_dir, tracker, number)
    return number
