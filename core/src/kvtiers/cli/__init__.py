"""The command line: ``kvtiers check | tiers | replay``."""
