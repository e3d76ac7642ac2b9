"""What if: the hit rates that other sizes, policies and tiers would have, found with keys alone."""
