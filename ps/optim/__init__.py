"""torch.optim on the shards."""
