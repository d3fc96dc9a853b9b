"""Random and stateful tests of pure code."""
