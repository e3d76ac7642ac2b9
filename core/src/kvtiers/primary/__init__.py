"""The primary tier: CPU memory, one row a chunk, shared by all workers."""
