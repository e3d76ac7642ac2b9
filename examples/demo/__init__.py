"""Four acts that show on this machine, within two minutes, what kvtiers promises. ``python -m demo --help``."""
