"""The shared memory of one engine's primary tier, and how its processes find and map it."""
