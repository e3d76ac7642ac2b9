"""The commands ``kvtiers replay``, ``plan`` and ``size``."""
