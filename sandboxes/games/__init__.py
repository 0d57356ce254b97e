"""Games for two policies, and the exact exploitability of a policy in them."""
