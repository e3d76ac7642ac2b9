"""The command line ``kvtiers``."""
