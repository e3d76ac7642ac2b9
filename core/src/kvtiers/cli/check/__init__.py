"""``kvtiers check``: validate a config, try every tier, and examine this machine."""
