"""Tiers as they were written for API 1, frozen: they go on working for as long as kvtiers has that number."""
