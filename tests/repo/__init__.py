"""The repository itself: contracts, surface, drift."""
