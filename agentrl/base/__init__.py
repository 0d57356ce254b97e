"""Helpers that are independent of reinforcement learning: files, processes, locks, SQLite, secrets, and calls of user-supplied code.

This package imports only the standard library, pydantic and `agentrl.errors`.
"""
