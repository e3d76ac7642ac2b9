"""``kvtiers store``: list, count, verify, delete and retire the values in a tier's store."""
