"""A kvtiers tier that keeps values as objects in an S3 bucket, shared by everybody who may use it."""
