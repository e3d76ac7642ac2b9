"""Tiers that move rows by themselves, in the engine's process (``SecondaryTierManager``)."""
