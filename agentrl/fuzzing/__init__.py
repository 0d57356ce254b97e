"""Fuzzing as a part of the product: every boundary where somebody else's bytes come in is a target, and one command feeds them all.

A target gets bytes and may answer with nothing but what its boundary documents: a result, or one of the boundary's own errors.
"""
