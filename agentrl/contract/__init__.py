"""Shared by tasks, sandboxes and rewards: collecting outputs, grading, recordings, and comparing numbers."""
