"""Clients that move values: obstore's, boto3's, and the choice between them."""
