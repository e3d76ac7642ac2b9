"""The eviction policy that learns when a conversation comes back."""

from kvtiers.primary.eviction.turn_hazard.policy import TurnHazardPolicy

__all__ = ["TurnHazardPolicy"]
