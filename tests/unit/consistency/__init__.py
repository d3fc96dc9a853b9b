"""Unit tests of ps.consistency."""
