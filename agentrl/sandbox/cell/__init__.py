"""Cells run sandboxes on other machines or in pods. A cell opens bubblewrap sandboxes and connects each sandbox to the driver that
requested it.

`server` runs in the cell, `backend` in drivers and workers, and `wire` defines the messages between them. `claims` obtains cells
from Kubernetes when they are needed.
"""

from agentrl.sandbox.cell.backend import CellBackend, open_cells
from agentrl.sandbox.cell.claims import ClaimBackend, open_claims

__all__ = ["CellBackend", "ClaimBackend", "open_cells", "open_claims"]
