"""Equality with a single-process reference."""
