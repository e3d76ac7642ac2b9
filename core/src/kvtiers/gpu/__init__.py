"""Copies between a worker's KV blocks and the region's rows."""
