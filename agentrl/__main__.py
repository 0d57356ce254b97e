"""`python -m agentrl` is the command line."""

from agentrl.cli import main

main()
