"""A kvtiers tier that keeps values in Mooncake Store: the memory of many machines as one pool."""
