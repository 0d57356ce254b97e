"""The service desk of a shop: customers with a hidden goal, orders that change, rules that forbid some changes. See `rewards.desk`."""

from sandboxes.desk.family import Desk
from sandboxes.desk.shop import Shop

__all__ = ["Desk", "Shop"]
