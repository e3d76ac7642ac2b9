"""Tiers under vLLM's own tiering: every installed tier as a secondary tier ``kvtiers-<type>``."""
