"""The eviction policy that learns when a conversation comes back."""

from kvtiers_policies.turn_hazard.policy import TurnHazardPolicy

__all__ = ["TurnHazardPolicy"]
