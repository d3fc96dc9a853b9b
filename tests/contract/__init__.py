"""One suite per seam, over a table of implementations."""
