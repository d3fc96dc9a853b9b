"""Hosts as network namespaces."""
