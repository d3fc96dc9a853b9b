"""Generated protobuf and gRPC code; never edited, see proto/README.md."""
