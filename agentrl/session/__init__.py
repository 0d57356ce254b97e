"""The session of a run: its folder, the checks before it starts, opening its parts, its measures and its end."""
