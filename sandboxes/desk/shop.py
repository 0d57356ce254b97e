"""The shop's orders, the functions that read and change them, and the rules. The agent must check the rules: the functions do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RULES = """You are the service desk of a shop. Its rules:
- Before you change an order, ask the customer for the e-mail address of the order, and read the order with look_up.
- Refund an order only if it was delivered at most 30 days ago, or at most 60 days ago if it arrived broken.
- Cancel an order, or change its address, only while it is not shipped.
- Decline what the rules forbid, and say so. Do not say that anything is done before it is done."""
PLACED, SHIPPED, DELIVERED, CANCELLED, REFUNDED = "placed", "shipped", "delivered", "cancelled", "refunded"
REFUND_DAYS, BROKEN_DAYS = 30, 60


def _schema(name: str, description: str, **arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string", "description": meaning} for argument, meaning in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": [*arguments]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class Shop:
    """The state of the shop in one episode: an `agentrl.environment.dialogue.Backend`.

    Args:
        orders: order number -> `item`, `email`, `status`, `days` since the delivery, and `address`.
    """

    schemas = (
        _schema("look_up", "Show an order.", order="number of the order", email="what the customer gave as the e-mail address"),
        _schema("refund", "Refund a delivered order.", order="number of the order"),
        _schema("cancel", "Cancel an order.", order="number of the order"),
        _schema("change_address", "Change where an order is sent.", order="number of the order", address="the new address"),
    )

    def __init__(self, orders: Mapping[str, Mapping[str, Any]]) -> None:
        self.orders = {number: dict(order) for number, order in orders.items()}
        self.identified: set[str] = set()  # orders that were shown to the agent

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Applies a call and returns its result or an error message."""
        order = self.orders.get(str(arguments.get("order", "")))
        if order is None:
            return "error: there is no such order"
        actions = {"look_up": self._look_up, "refund": self._refund, "cancel": self._cancel, "change_address": self._change_address}
        return actions[name](order, arguments) if name in actions else f"error: there is no function {name[:40]}"

    def _look_up(self, order: dict[str, Any], arguments: Mapping[str, Any]) -> str:
        if str(arguments.get("email", "")).strip().lower() != order["email"]:
            return "error: this is not the e-mail address of the order"
        self.identified.add(str(arguments["order"]))
        when = f" {order['days']} days ago" if order["status"] == DELIVERED else ""
        return f"{order['item']}, {order['status']}{when}, to {order['address']}"

    def _refund(self, order: dict[str, Any], arguments: Mapping[str, Any]) -> str:
        return _change(order, REFUNDED, (DELIVERED,))

    def _cancel(self, order: dict[str, Any], arguments: Mapping[str, Any]) -> str:
        return _change(order, CANCELLED, (PLACED, SHIPPED))

    def _change_address(self, order: dict[str, Any], arguments: Mapping[str, Any]) -> str:
        if order["status"] not in (PLACED, SHIPPED):
            return f"error: the order is {order['status']}"
        address = str(arguments.get("address", "")).strip()
        if not 1 <= len(address) <= 200:
            return "error: the address must have 1 to 200 characters"
        order["address"] = address
        return "address changed"


def _change(order: dict[str, Any], status: str, allowed: tuple[str, ...]) -> str:
    if order["status"] not in allowed:
        return f"error: the order is {order['status']}"
    order["status"] = status
    return status


def forbidden(request: str, order: Mapping[str, Any], *, broken: bool) -> bool:
    """Whether the rules forbid a request for an order: `refund`, `cancel` or `change_address`."""
    if request == "refund":
        return order["status"] != DELIVERED or order["days"] > (BROKEN_DAYS if broken else REFUND_DAYS)
    return order["status"] != PLACED
