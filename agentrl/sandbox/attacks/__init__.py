"""Attacks on sandboxes, as programs that ship with the product: `agentrl sandbox attack` throws them at a backend and judges.

`programs/` holds what an agent would run, one attack a file; `hostile_server` is an exec server that has been taken over.
"""

from agentrl.sandbox.attacks.cases import Attack, attacks
from agentrl.sandbox.attacks.suite import ATTACK_SPEC, AttackResult, attack

__all__ = ["ATTACK_SPEC", "Attack", "AttackResult", "attack", "attacks"]
