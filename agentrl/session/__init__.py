"""The session of a run: its folder, the checks before it starts, the opening of its parts, its metrics, and the report of how it ended."""
