"""Reports of the learner to the driver."""

from __future__ import annotations

import json

from agentrl.base.liveness import Liveness
from agentrl.learner.driver_reports import ProgressLines


def test_malformed_lines_are_ignored() -> None:
    liveness, alerts = Liveness("the learner", first_s=600.0, least_s=600.0), list[str]()
    lines = [
        "",
        "{",
        "[1, 2]",
        '[NaN, 1, "x"]',
        '[1, Infinity, "x"]',
        f'[1{"0" * 400}, 1, "x"]',
        "[1, 1, 2]",
        "[" * 5000,
        json.dumps("disk"),
    ]
    ProgressLines().forward("\n".join([*lines, '"cut']).encode(), liveness, alerts.append)
    assert alerts == ["disk"]
