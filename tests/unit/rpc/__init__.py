"""Mirrors `ps/rpc`."""
