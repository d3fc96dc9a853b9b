"""Real RPC and gRPC on loopback."""
