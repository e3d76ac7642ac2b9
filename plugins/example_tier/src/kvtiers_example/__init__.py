"""Two memory tiers for kvtiers: ``memory``, a store to copy, and ``memory-async``, a tier that never blocks."""
