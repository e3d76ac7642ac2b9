"""Authenticated encryption of values: sources of keys, what is derived from them, the encrypted seal, keyed names."""
