"""Pure functions from a model to shards and from shards to servers."""
