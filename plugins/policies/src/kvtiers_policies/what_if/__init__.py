"""Shadow caches: the hit rates that other sizes, policies and tiers would have, found with keys alone."""
