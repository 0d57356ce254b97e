"""Parts of benchmarks/rollout.py: a scripted server, and the same episodes driven by agentrl and by its peer."""
