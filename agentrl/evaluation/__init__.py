"""Evaluates held-out splits and suites of cases, stores the results, and compares two evaluations statistically.

The pytest plug-in is part of this package, and pytest imports it in every run. So this file imports nothing.
"""
