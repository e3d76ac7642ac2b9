"""A kvtiers tier that keeps values as files in one directory, shared by many processes and machines."""
