"""Fuzzing as part of the product: every boundary that takes untrusted bytes is a target, and one command feeds them all.

A target gets bytes and may answer only as its boundary documents: with a result, or one of the boundary's own errors.
"""
