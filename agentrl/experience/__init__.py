"""The experience store between the driver and the learner, its ledger of groups, and the checkpoints of running episodes.

The driver and the learner communicate only through the store, so either may die at any moment.
"""

from agentrl.experience.blocks import BlockStarts
from agentrl.experience.checkpoints import FolderCheckpoints, drop_unused_images
from agentrl.experience.driver_store import DriverStore
from agentrl.experience.ledger import GroupOrder, new_entry
from agentrl.experience.store import SqliteStore, open_store

__all__ = ["BlockStarts", "DriverStore", "FolderCheckpoints", "GroupOrder", "SqliteStore", "drop_unused_images", "new_entry", "open_store"]
