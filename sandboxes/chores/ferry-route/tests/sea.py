"""Prints what the function gives for the large timetable."""

import importlib
import json
import sys

sys.path[:0] = [".", "ferry"]
table, route = (importlib.import_module(name) for name in ("timetable", "route"))
print(json.dumps(route.earliest(table.connections, table.chain[0], table.chain[-1], 100)))
