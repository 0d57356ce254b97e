"""Runs the command line interface for `python -m agentrl`."""

from agentrl.cli import main

main()
