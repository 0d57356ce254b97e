"""Evaluations: held-out splits and suites of cases, their results, and the statistics that compare two of them.

The pytest plug-in is part of this package, and pytest imports it in every run: this file imports nothing.
"""
