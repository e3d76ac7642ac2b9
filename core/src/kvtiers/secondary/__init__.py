"""What core does for the author of a tier: threads, helper processes, retries, seals, lookups, breaker."""
