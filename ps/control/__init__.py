"""Control plane: membership, shard map, data leases, status."""
