"""Opens the OpenTelemetry traces of a run (`agentrl.observe.traces`) if environment variables enable them.

The standard variables enable and configure them: `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_EXPORTER`, `OTEL_TRACES_SAMPLER`,
`OTEL_SERVICE_NAME` and so on. If they do not enable traces, the run has no tracker for traces, and OpenTelemetry is not imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.base.installation import import_optional
from agentrl.base.user_code import printable
from agentrl.config.recipe import Recipe
from agentrl.errors import UserError
from agentrl.experience import open_store
from agentrl.observe.background import BackgroundTracker
from agentrl.observe.services import stored_id
from agentrl.records import GroupUse

if TYPE_CHECKING:
    from agentrl.observe.traces import EpisodeTraces

CLOSE_S = 5.0
"""Maximum time to wait for a collector at the end of a run, in seconds."""
_NEEDED = "a trace exporter, which environment variables such as OTEL_EXPORTER_OTLP_ENDPOINT enable,"
_GROUP = "opentelemetry_traces_exporter"  # group of entry points for exporters
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def open_traces(recipe: Recipe, folder: Path, *, alert: Callable[[str], None]) -> list[BackgroundTracker]:
    """Returns a list with a tracker that exports traces; empty if the environment variables do not enable traces. Call this function in the
    event loop.

    Args:
        alert: called once, in the event loop, if spans cannot be exported.

    Raises `UserError` if a package is missing or an exporter is unknown.
    """
    if not (names := exporters_wanted()):
        return []
    loop = asyncio.get_running_loop()

    def alert_in_loop(text: str) -> None:
        with suppress(RuntimeError):  # the run has ended
            loop.call_soon_threadsafe(alert, text)

    opening = partial(_open, names, recipe, folder, alert_in_loop)
    return [BackgroundTracker(opening, name="opentelemetry", close_s=CLOSE_S)]


def exporters_wanted(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the names of the exporters that the environment variables enable; empty if traces are disabled."""
    named = [name.strip() for name in environment.get("OTEL_TRACES_EXPORTER", "").split(",") if name.strip()]
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or "none" in named:
        return []
    return named or ["otlp"] * any(environment.get(name) for name in _ENDPOINTS)


def _open(names: Sequence[str], recipe: Recipe, folder: Path, alert: Callable[[str], None]) -> EpisodeTraces:
    sdk, resources = (import_optional(f"opentelemetry.sdk.{name}", "opentelemetry", needed_for=_NEEDED) for name in ("trace", "resources"))
    from agentrl.observe.traces import EpisodeTraces

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # failed exports cause one alert instead of one log line each
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    own = {"agentrl.run": printable(folder.name, 200)} | ({} if named else {"service.name": "agentrl"})
    provider = sdk.TracerProvider(resource=resources.Resource.create(own), shutdown_on_exit=False)  # reads the variables for the sampler
    return EpisodeTraces(
        provider,
        [_exporter(name) for name in names],
        run_id=stored_id(folder, "opentelemetry"),
        model=recipe.policy.model,
        uses=partial(_uses_of_step, recipe, folder),
        alert=alert,
    )


def _exporter(name: str) -> Any:
    if name == "otlp":
        protocol = next((value for key in _PROTOCOLS if (value := os.environ.get(key))), "http/protobuf")
        name = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}.get(protocol, protocol)
    matches = list(entry_points(group=_GROUP, name=name))
    if not matches:
        known = ", ".join(sorted({entry_point.name for entry_point in entry_points(group=_GROUP)})) or "none"
        raise UserError(
            f"there is no trace exporter {printable(name, 80)!r} (installed: {known})",
            fix="change OTEL_TRACES_EXPORTER or OTEL_EXPORTER_OTLP_PROTOCOL, or install the exporter's package",
        )
    return matches[0].load()()


def _uses_of_step(recipe: Recipe, folder: Path, step: int) -> dict[int, GroupUse | None]:
    """Returns how the learner step of version `step` used each of its groups, by group index, as recorded in the ledger."""
    store = open_store(folder, recipe)
    try:
        return {entry.index: entry.use for entry in store.entries(step=step - 1) if not entry.is_residual}
    finally:
        store.close()
