"""The engine's side of secondary tiers: breakers, presence caches, in-flight jobs, and the life of tier hosts."""
