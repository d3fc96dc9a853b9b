"""Unit tests of ps.store."""
