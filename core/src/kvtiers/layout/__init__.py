"""What the bytes of a row mean: cache layout, fingerprint, storage names and seals."""
