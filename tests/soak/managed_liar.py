"""The tier type ``managed-liar``: a tier of the third rung whose loads may be mutated, fail, or take long."""

import random
import time

from kvtiers.api import TierPlugin, hookimpl
from kvtiers_example.config import MemoryAsyncConfig
from kvtiers_example.example_tier import ExampleSecondaryTier


class ManagedLiar(ExampleSecondaryTier):
    def _move(self, move):
        moved = super()._move(move)
        for _, row, _ in moved.values_to_write:
            match random.randrange(16):
                case 0:
                    self._row(row)[random.randrange(self._value_bytes)] ^= 1 << random.randrange(8)
                case 1:
                    moved.failed = True
                case 2:
                    time.sleep(random.uniform(0.0, 0.05))
        return moved


@hookimpl
def kvtiers_tier():
    return TierPlugin(
        name="managed-liar",
        kind="manager",
        config=MemoryAsyncConfig,
        open=lambda config, context: ManagedLiar(context, max_blocks=config.max_blocks),
        api_version=1,
    )
