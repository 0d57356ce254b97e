"""Days in a house with four doors, one of which hides gold. A house is a project, so the notes from one episode help the next episode.

`DoorTasks(seed=0)` is the family, and `Doors` is its environment.
"""

from sandboxes.doors.house import Doors, DoorTasks

__all__ = ["DoorTasks", "Doors"]
