"""The driver of LMCache's server: its real factory, and memory objects, as the integration's own tests have them."""

import sys
from importlib.metadata import version
from pathlib import Path

from common import Here, assert_mapped, compared

sys.path.insert(0, str(Path(__file__).parents[3] / "integrations" / "lmcache"))

from tests.conftest import params_of
from tests.parts import Layout, Server, SharedMemory, content, keys_of

VALUES = 4


def release():
    return f"LMCache {version('lmcache')}"


def options_of(config, weights):
    """Return the options of the integration, whose deadlines are the tier's."""
    deadline = config["secondary"][0]["deadline"]
    times = {"lookup_deadline": deadline, "deadline": deadline, "store_deadline": deadline}
    return params_of(config, weights=weights, **times)


class Engine(Here):
    def __init__(self, config, weights):
        self._memory, self._shift = SharedMemory(), sum(weights.encode())
        self._tier = config["secondary"][0]
        self._server = Server(options_of(config, weights), self._memory)

    def _keys(self, seed):
        return keys_of(VALUES, VALUES * seed)

    def _objects(self, seed):
        return self._memory.filled(VALUES, Layout(), self._shift + seed)

    def put(self, seed):
        stored = self._server.put(self._keys(seed), self._objects(seed)).is_successful()
        self._free()
        return VALUES * stored

    def get(self, seed):
        got = compared(self._server.fetch(self._keys(seed)), content(self._objects(seed)))
        self._free()
        return got

    def _free(self):
        """Free the memory objects, of which the integration's own tests need few."""
        for it in self._memory._objects:
            it.ref_count_down()
        self._memory._objects.clear()

    def close(self):
        assert_mapped(self._tier, self._server.adapter.report_status()["clients"])
        self._server.close()
        self._memory.close()


open = Engine  # noqa: A001 -- the interface of drivers
