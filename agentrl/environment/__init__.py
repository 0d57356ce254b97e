"""Environments: worlds that answer an agent, in this process, in others, and in hosts of other Python environments."""
