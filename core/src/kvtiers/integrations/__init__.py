"""Adapters to engines. Nothing else in kvtiers imports them, and they import their engine only when it is there."""
