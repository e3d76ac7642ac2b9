"""An engine of a pool, to be killed: it stores so many prompts, or none, says so, and steps on."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from tests.integration.pool.test_engines import config, running, step_until, store
from tests.pool_rig import chain


def main(pool, tier, prompts):
    """Wait for no tier. A byte at the end, and for each step from then on."""
    with running(config(SimpleNamespace(path=Path(pool)), json.loads(tier))) as engine:
        for prompt in range(int(prompts)):
            store(*engine, chain(prompt, 8), ends=False)
        step_until(engine[0], lambda: engine[0].stats()["tiers"]["fs"]["own"]["open"])
        while True:
            os.write(1, b".")
            engine[0].on_schedule_end()
            time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
