"""The command ``kvtiers new-tier`` and the templates that it fills in."""
