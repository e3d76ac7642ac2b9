"""The driver of ``kvtiers.open_client``: bytes and keys."""

from common import MODEL, Here, bytes_of, compared

import kvtiers

VALUES, LENGTH = 4, 9_000


def release():
    return f"kvtiers {kvtiers.__version__}"


class Engine(Here):
    def __init__(self, config, weights):
        self._weights = weights
        self._client = kvtiers.open_client(
            config, kvtiers.ModelIdentity(MODEL, weights=weights), LENGTH, bounce_bytes=1 << 20
        )

    def _keys(self, seed):
        return [bytes([seed, number]) * 16 for number in range(VALUES)]

    def _values(self, seed):
        return [bytes_of(seed, self._weights, number, LENGTH) for number in range(VALUES)]

    def put(self, seed):
        return sum(self._client.put(self._keys(seed), self._values(seed)).stored)

    def get(self, seed):
        # In two parts, as an engine has keys and values.
        buffers = [(bytearray(LENGTH // 3), bytearray(LENGTH - LENGTH // 3)) for _ in range(VALUES)]
        found = self._client.get_into(self._keys(seed), [list(parts) for parts in buffers])
        got = [b"".join(parts) if is_there else None for parts, is_there in zip(buffers, found, strict=True)]
        return compared(got, self._values(seed))

    def close(self):
        self._client.close()


open = Engine  # noqa: A001 -- the interface of drivers
