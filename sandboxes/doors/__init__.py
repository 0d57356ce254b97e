"""Days in a house with four doors, one of which hides gold. The house belongs to the project, so notes of one episode help the next.

`DoorTasks(seed=0)` is the family, and `Doors` its environment.
"""

from sandboxes.doors.house import Doors, DoorTasks

__all__ = ["DoorTasks", "Doors"]
