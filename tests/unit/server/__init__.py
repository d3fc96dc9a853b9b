"""Unit tests of ps.server."""
