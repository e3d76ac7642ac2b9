"""A kvtiers tier that keeps values as blobs in a container of Azure Blob Storage, shared by all engines."""
