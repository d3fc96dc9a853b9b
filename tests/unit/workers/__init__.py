"""Unit tests of the worker side."""
