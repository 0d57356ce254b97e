"""What benchmarks/rollout.py measures with: a server that answers by script, and the same episodes driven by agentrl and by its peer."""
