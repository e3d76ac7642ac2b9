"""The common part of the tiers over object stores: the data path, parts, failures, counts."""
