"""The version of the package; the formats have numbers of their own."""

__version__ = "0.1.0"
