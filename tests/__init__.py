"""Tests; tests/README.md says which tier proves what."""
