"""Stores the pace of the policy's server in the run folder, so that a resumed run can compare it with the pace in earlier sessions."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import Any

from agentrl.base.files import write_atomically
from agentrl.config.recipe import Recipe
from agentrl.rollout import Pace

log = logging.getLogger(__name__)
PACE_FILE = "pace.json"


def restore_pace(recipe: Recipe, folder: Path) -> Pace:
    """Returns the pace of a run, with the history from its earlier sessions if the settings and the machine are the same. Logs
    and ignores a history that cannot be read."""
    pace, path = Pace(slots=recipe.serving.max_num_seqs * recipe.serving.replicas), folder / PACE_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["of"] == _settings(recipe):
            pace.restore(data["history"])
        else:
            log.warning("the server's usual pace is measured again: machine or settings differ from those of %s", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        log.warning("the server's usual pace is measured again: %s cannot be read (%s)", path, error)
    return pace


def history_of(pace: Pace) -> dict[str, Any] | None:
    """Returns the history of a pace for `Pace.restore`; None if there is no history."""
    return pace.to_data() if pace.known else None


def save_pace(pace: Pace, recipe: Recipe, folder: Path) -> None:
    """Writes the history of a pace to the run folder if there is any."""
    if pace.known:
        write_atomically(folder / PACE_FILE, json.dumps({"of": _settings(recipe), "history": pace.to_data()}))


def _settings(recipe: Recipe) -> str:
    """Returns a hash of the settings that determine a server's pace."""
    serving = recipe.serving.model_dump(mode="json", exclude={"request_timeout_s", "startup_timeout_s", "probe_max_abs_diff"})
    machine = (platform.node(), platform.machine(), os.cpu_count(), os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    parts = [serving, recipe.policy.model_dump(mode="json"), recipe.device, machine]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
