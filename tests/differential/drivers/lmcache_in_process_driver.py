"""The driver of LMCache inside an engine: its real loader, remote backend and memory objects."""

from common import Here, compared
from lmcache_driver import options_of, release
from tests.test_connector import Engine as Parts

__all__ = ["open", "release"]
VALUES = 4


class Engine(Here):
    def __init__(self, config, weights):
        options = options_of(config, weights)
        del options["store_deadline"]
        self._parts, self._shift = Parts(options), sum(weights.encode())

    def _keys(self, seed):
        return self._parts.keys(VALUES, VALUES * seed)

    def put(self, seed):
        self._parts.store(self._keys(seed), self._shift + seed)

    def get(self, seed):
        right = self._parts.objects(VALUES, self._shift + seed)
        values = [bytes(it.byte_array) for it in right]
        for it in right:
            it.ref_count_down()
        keys = self._keys(seed)
        there = self._parts.remote.batched_contains(keys)
        got = self._parts.load(keys[:there]) if there else []
        return compared([*got, *[None] * (VALUES - len(got))], values)

    def close(self):
        self._parts.close()


open = Engine  # noqa: A001 -- the interface of drivers
