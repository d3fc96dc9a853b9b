"""Data plane over torch.distributed.rpc."""
