"""Unit tests of ps.sharding."""
