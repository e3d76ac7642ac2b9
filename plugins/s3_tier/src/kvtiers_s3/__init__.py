"""A kvtiers tier that keeps values as objects in an S3 bucket, shared by all engines with access to it."""
