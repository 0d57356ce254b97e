"""Evaluates policies on held-out splits and suites of cases, stores the results, and compares two evaluations statistically.

This file imports nothing, because the pytest plug-in is part of this package and is imported in every pytest run.
"""
