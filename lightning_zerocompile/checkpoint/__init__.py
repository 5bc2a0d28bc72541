"""What a run saves and loads: one file with full tensors, or a directory of shards."""
