"""What a person sees of a run: live progress, metrics, the summary and the report.

Reading a run folder (`Summary.read`, `write_report`) needs the core installation only; `RunTracker` and `Rate` load TensorBoard
and SciPy when they are used.
"""

from agentrl.observe.report import write_report
from agentrl.observe.stats import Rate
from agentrl.observe.summary import Summary
from agentrl.observe.tracker import RunTracker

__all__ = ["Rate", "RunTracker", "Summary", "write_report"]
