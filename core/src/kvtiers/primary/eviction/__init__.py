"""Which chunk leaves the primary first."""
