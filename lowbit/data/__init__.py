"""Documents to packed shards to batches."""
