"""Unit tests of ps.optim."""
