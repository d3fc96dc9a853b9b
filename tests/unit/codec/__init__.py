"""Unit tests of ps.codec."""
