"""Attacks on sandboxes, shipped with the product: `agentrl sandbox attack` runs them against a backend and judges the result.

`programs/` holds programs that an agent might run, one attack a file; `hostile_server` is a compromised exec server.
"""

from agentrl.sandbox.attacks.cases import Attack, load_attacks
from agentrl.sandbox.attacks.suite import ATTACK_SPEC, AttackResult, run_attacks

__all__ = ["ATTACK_SPEC", "Attack", "AttackResult", "load_attacks", "run_attacks"]
