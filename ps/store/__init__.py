"""What a shard is made of."""
