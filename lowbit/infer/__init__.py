"""Generation: the KV cache, sampling, and the one engine behind generate and evaluation."""
