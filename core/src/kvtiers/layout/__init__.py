"""The meaning of a row's bytes: cache layout, fingerprint, storage names and seals."""
