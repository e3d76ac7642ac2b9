"""A kvtiers tier that keeps values as objects in a bucket of Google Cloud Storage, shared by all engines."""
