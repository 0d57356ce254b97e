"""Attacks on sandboxes, shipped with the product. `agentrl sandbox attack` runs the attacks against a backend.

`programs/` contains programs that an agent might run, one attack per file; `hostile_server` is a compromised exec server.
"""

from agentrl.sandbox.attacks.suite import ATTACK_SPEC, Attack, AttackResult, load_attacks, run_attacks

__all__ = ["ATTACK_SPEC", "Attack", "AttackResult", "load_attacks", "run_attacks"]
