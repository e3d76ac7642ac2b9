"""Servers for tests of tiers over object stores."""
