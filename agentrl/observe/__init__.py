"""What a person sees of a run: live progress, metrics, the summary and the report.

Reading a run folder (`Summary.read`, `write_report`) needs the core installation only; the TensorBoard tracker loads TensorBoard when it
is made.
"""

from agentrl.observe.report import write_report
from agentrl.observe.stats import Rate
from agentrl.observe.summary import Summary
from agentrl.observe.tracker import RunTracker, StageClock, open_trackers

__all__ = ["Rate", "RunTracker", "StageClock", "Summary", "open_trackers", "write_report"]
