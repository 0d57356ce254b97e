"""Calibration of judges: human labels, a judge's agreement with them, and corrected success rates."""
