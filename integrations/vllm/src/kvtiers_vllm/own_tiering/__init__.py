"""Way in: every installed tier as a secondary tier of vLLM's own tiering (``kvtiers-<type>``)."""
