"""Fuzz targets: one module for each boundary, with a module-level `target`."""
