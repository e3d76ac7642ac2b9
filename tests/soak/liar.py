"""The tier type ``liar``: values in files, of which each reply may be mutated, cut off, or another's."""

import random
from pathlib import Path

from pydantic import Field

from kvtiers.api import ChunkStore, TierConfig, TierPlugin, hookimpl


class LiarConfig(TierConfig):
    """Its one option."""

    root: str = Field(description="folder of the values")


class Liar(ChunkStore):
    def __init__(self, config):
        self.root = Path(config.root)
        self.random = random.Random()

    def _path(self, name):
        return self.root / name.replace("/", "_")

    def read_into(self, name, dst):
        try:
            value = bytearray(self._path(name).read_bytes())
        except FileNotFoundError:
            return 0
        match self.random.randrange(8):
            case 0:
                value[self.random.randrange(len(value))] ^= 1 << self.random.randrange(8)
            case 1:
                value[self.random.randrange(len(value)) :] = b""
            case 2:
                value = bytearray(self.random.choice(list(self.root.iterdir())).read_bytes())
            case 3:
                raise ConnectionResetError("as it likes")
        dst[: len(value)] = value[: len(dst)]
        return len(dst)

    def write(self, name, src):
        self._path(name).write_bytes(src)  # in place: a kill leaves half a value

    def exists(self, names):
        return [self.random.random() < 0.1 or self._path(name).exists() for name in names]

    def delete(self, names):
        for name in names:
            if self.random.random() < 0.5:
                self._path(name).unlink(missing_ok=True)


@hookimpl
def kvtiers_tier():
    return TierPlugin(name="liar", kind="store", config=LiarConfig, open=lambda config, _: Liar(config), api_version=1)
