"""A small real store, for tests that need one."""

from kvtiers.api import ChunkStore


class DictStore(ChunkStore):
    """Values in a dict."""

    def __init__(self):
        self.values = {}

    def read_into(self, name, dst):
        value = self.values.get(name, b"")
        if len(value) > len(dst):
            return 0
        dst[: len(value)] = value
        return len(value)

    def write(self, name, src):
        self.values[name] = bytes(src)

    def exists(self, names):
        return [name in self.values for name in names]

    def delete(self, names):
        for name in names:
            self.values.pop(name, None)
