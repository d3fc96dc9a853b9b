"""Fakes, clusters and oracles that the tests share."""
