"""Cells: sandboxes on a different machine or pod. A cell opens bubblewrap sandboxes and connects each to the driver that requested it.

`server` runs in the cell, `backend` in drivers and workers, and `wire` is what they exchange. `claims` gets cells from Kubernetes when
they are needed.
"""

from agentrl.sandbox.cell.backend import CellBackend, open_cells
from agentrl.sandbox.cell.claims import ClaimBackend, open_claims

__all__ = ["CellBackend", "ClaimBackend", "open_cells", "open_claims"]
