"""Cells: sandboxes of another machine or pod. A cell opens bubblewrap sandboxes and connects each to the driver that asked for it.

`server` runs in the cell, `backend` in drivers and workers, and `wire` is what they exchange.
"""

from agentrl.sandbox.cell.backend import CellBackend, open_cells

__all__ = ["CellBackend", "open_cells"]
