"""Clients that move values: obstore's and boto3's, with one interface."""
