"""Environments of other people: virtual environments of their packages."""
