"""The engine's side of secondary tiers."""
