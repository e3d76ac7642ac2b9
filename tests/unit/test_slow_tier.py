"""A store so far away that no answer comes in time, with a whole stack before it."""

import logging
import time

from tests.unit.test_runtime import config, running

from kvtiers.api import make_offload_key
from kvtiers.types import PromptGroup, RequestContext

FAR = """
import time
from kvtiers.api import ChunkStore

class Far(ChunkStore):
    def read_into(self, name, dst):
        return 0

    def exists(self, names):
        time.sleep(0.2)
        return [not name.endswith("_epoch") for name in names]

    def write(self, name, src):
        pass

    def delete(self, names):
        pass

return Far()
"""
PATIENCE = 60.0


def test_a_store_200_ms_away_is_said_once_and_is_a_figure(distributions, caplog):
    distributions.tier("far", opened=FAR)
    caplog.set_level(logging.INFO, logger="kvtiers")
    asked = config(secondary=[{"type": "far", "io": "thread"}]) | {"lookup_wait": "20ms", "load_wait": "auto"}
    with running(asked) as (manager, _, _):
        until = time.monotonic() + PATIENCE
        number = 0
        while not manager.stats()["tiers"]["far"]["too_slow"]:
            assert time.monotonic() < until, "nothing says that the tier is too slow"
            number += 1
            _request(manager, number)
    (line,) = [record.getMessage() for record in caplog.records if "too slow" in record.getMessage()]
    assert line.startswith("far: too slow: ")
    assert "lookup_wait" in line


def _request(manager, number):
    """Look up a prompt that was never seen before until nothing is to be waited for, as an engine does."""
    keys = [make_offload_key(bytes([number % 256, number // 256, place]) * 8, 0) for place in range(16)]
    context = RequestContext(f"r{number}")
    while True:
        hits = manager.reach([PromptGroup(keys)], context).in_chunks(manager.tokens_per_chunk[0])
        manager.on_schedule_end()
        if not hits.waits:
            break
        time.sleep(0.005)
    manager.on_request_finished(context)
