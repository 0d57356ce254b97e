"""Live progress, metrics, summary and report of a run.

`Summary.read` and `write_report` need only the core installation. TensorBoard is imported when its tracker is opened.
"""

from agentrl.observe.report import write_report
from agentrl.observe.stats import Rate
from agentrl.observe.summary import Summary
from agentrl.observe.tracker import RunTracker, StageClock, open_trackers

__all__ = ["Rate", "RunTracker", "StageClock", "Summary", "open_trackers", "write_report"]
