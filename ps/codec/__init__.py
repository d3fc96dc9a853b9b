"""What a shard's elements look like on the wire: as they are, or in fewer bytes."""
