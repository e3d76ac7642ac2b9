"""An engine for tests: a manager with a real region and real hosts, driven step by step, rows filled and compared.

Its clock can be wound on, so that a deadline may be longer than the busiest machine takes and still pass at once.
"""

import time
from pathlib import Path

import numpy as np

import kvtiers
from kvtiers.api import make_offload_key
from kvtiers.base import RequestContext
from kvtiers.rows.layout import CacheLayout, KVGroup, KVTensor, ModelIdentity

PATIENCE = 60.0
PAYLOAD, VALUE = 4000, 4096
LAYOUT = CacheLayout(
    ModelIdentity("test/model", weights="w1"),
    (KVGroup("all", 16),),
    tuple(KVTensor(f"t{i}", 0, 2000) for i in range(2)),
)
POISON = 0xDB


def key(number):
    return make_offload_key(number.to_bytes(32, "big"), 0)


def keys(first, count):
    return [key(number) for number in range(first, first + count)]


def payload(of, version=b"w1"):
    text = of + version
    return (text * (PAYLOAD // len(text) + 1))[:PAYLOAD]


class Engine:
    """One engine. ``tiers``: the config's ``secondary``; other keyword arguments go to the config's top level."""

    def __init__(self, *tiers, rows=256, layout=LAYOUT, **config):
        primary = {"capacity": f"{rows * VALUE // 1024}KiB", "prefault": False}
        budgets = {"store_reserve": "5%", "all_tiers": "80%", "one_tier": "80%", "protected": "10%"}
        waits = {"lookup_wait": "1h", "load_wait": "1h"}
        self.config = {"version": 1, "primary": primary, "secondary": list(tiers), "budgets": budgets} | waits | config
        self.manager = kvtiers.open_manager(self.config, layout)
        tensors = [np.zeros((1, 2000), np.uint8) for _ in range(2)]
        self.worker = kvtiers.open_worker(self.config, layout, tensors, engine_id=self.manager.engine_id)
        self.version = b"w1"
        self._requests = 0
        self._wound = 0.0
        self._take_the_clock()
        self.until(self.manager._engine.ready, "the rank's joining")

    # -- time

    def _take_the_clock(self):
        parts = [self.manager, self.manager._jobs, self.manager._waits]
        for slot in self.manager._slots:
            parts += [slot.tier, slot.tier._breaker, slot.tier._lookups]
        for part in parts:
            assert part._clock is time.monotonic
            part._clock = lambda: time.monotonic() + self._wound

    def wind(self, seconds):
        """Let so much time pass for the engine; for its hosts and their launcher there is none."""
        self._wound += seconds

    def end_grace(self, tier="faulty"):
        """Let the time be over in which the tier's host had to do something or be killed."""
        link = self._link(tier)
        for reason in list(link.life.kill_at):
            link.launcher.kill_unless_forgiven(link.life, reason, 0.0)

    # -- steps

    def step(self):
        self.manager.on_schedule_end()

    def until(self, condition, what="it", *, wind=0.0):
        """Step until the condition holds, and before each step wind the clock on by so many seconds."""
        begin = time.monotonic()
        while not condition():
            self.wind(wind)
            self.step()
            time.sleep(0.001)
            assert time.monotonic() < begin + PATIENCE, f"{what} does not happen; {self.manager.stats()['tiers']}"

    def until_available(self, *names):
        """Step until these tiers (or all) can be used."""
        slots = [slot for slot in self.manager._slots if not names or slot.name in names]
        self.until(lambda: all(slot.available() for slot in slots), "its becoming available")

    def until_idle(self):
        self.until(lambda: not self.manager.has_pending_work(), "its becoming idle")

    # -- chunks

    def request(self):
        self._requests += 1
        return RequestContext(f"request {self._requests}")

    def put(self, wanted):
        """Store chunks in the primary and let them cascade; returns at once."""
        ctx = self.request()
        plan = self.manager.prepare_store(wanted, ctx)
        assert plan is not None
        self.fill(plan)
        self.manager.complete_store(plan)
        self.manager.on_request_finished(ctx)
        self.step()
        return plan

    def fill(self, plan):
        for chunk, row in zip(plan.keys, plan.chunk_ids, strict=True):
            self.view[row * VALUE : row * VALUE + PAYLOAD] = payload(chunk, self.version)

    def store(self, wanted):
        """Store chunks and wait until the tiers have them."""
        self.put(wanted)
        self.until_idle()

    def lookup(self, wanted, ctx):
        return self.manager.lookup_prefix(wanted, ctx)

    def waits(self, wanted, ctx):
        """Ask once more; say whether the request still has something to wait for."""
        hits = self.lookup(wanted, ctx)
        return bool(hits.pending or hits.unresolved)

    def ask_until(self, condition, wanted, what="it"):
        """Ask step by step until the condition holds; return the request, to ask on with."""
        ctx = self.request()
        self.until(lambda: self.lookup(wanted, ctx) and condition(), what)
        return ctx

    def resolve(self, wanted, ctx=None, *, wind=0.0):
        """Ask step by step until there is nothing to wait for; return the hits."""
        ctx = ctx or self.request()
        hits = []

        def resolved():
            hits.append(self.lookup(wanted, ctx))
            return not hits[-1].pending and not hits[-1].unresolved

        self.until(resolved, "an answer", wind=wind)
        return hits[-1].ready

    def load(self, wanted):
        """Bring chunks up, and compare their bytes; return how many there are."""
        ctx = self.request()
        ready = self.resolve(wanted, ctx)
        if ready:
            plan = self.manager.prepare_load(wanted[:ready], ctx)
            for chunk, row in zip(plan.keys, plan.chunk_ids, strict=True):
                got = bytes(self.view[row * VALUE : row * VALUE + PAYLOAD])
                assert got == payload(chunk, self.version), f"wrong bytes in row {row}: {got[:80]!r}"
            self.manager.complete_load(plan)
        self.manager.on_request_finished(ctx)
        self.step()
        return ready

    def forget(self):
        """Empty the primary; the tiers keep their values."""
        self.until_idle()
        self.manager.reset_cache()
        self.step()

    def new_weights(self, version):
        """Go over to other weights."""
        self.manager.set_weights_version(version)
        self.version = version.encode()
        self.step()

    def poison(self):
        self.view[:] = bytes([POISON]) * len(self.view)

    def written_rows(self):
        """Return the rows that are not poison any more."""
        clean = bytes([POISON]) * VALUE
        rows = len(self.view) // VALUE
        return [row for row in range(rows) if bytes(self.view[row * VALUE : (row + 1) * VALUE]) != clean]

    @property
    def view(self):
        return self.manager._primary.get_kv_memoryview()

    # -- what can be seen

    def figures(self, tier="faulty"):
        self.step()
        return self.manager.stats()["tiers"][tier]

    def own(self, tier="faulty"):
        return self.figures(tier)["own"]

    @property
    def primary(self):
        self.step()
        return self.manager.stats()["primary"]

    def life(self, tier="faulty"):
        """The launcher's view of the tier's host; None while there is none."""
        return self._link(tier).host.life

    def linked_life(self, tier="faulty"):
        """The life that the engine's thread talks to."""
        return self._link(tier).life

    def _link(self, tier):
        return self.group(tier)._link

    def group(self, tier="faulty"):
        """The tier's backend: of several hosts, where it has several."""
        return next(slot for slot in self.manager._slots if slot.name == tier).tier._backend

    def each_host(self, tier="faulty"):
        """The process id of each of a tier's several hosts that runs, by its name."""
        lives = {host.name: host.backend._link.host.life for host in self.group(tier)._hosts}
        return {name: life.process.pid for name, life in lives.items() if life is not None}

    def host(self, tier="faulty"):
        """The process id of the tier's host; waits until there is one."""
        self.until(lambda: self.life(tier) is not None, "its host")
        return self.life(tier).process.pid

    def close(self, timeout=5.0):
        self.worker.shutdown()
        self.manager.shutdown(timeout)


class Gates:
    """The other end of a faulty store's gates."""

    def __init__(self, root):
        self.root = Path(root)

    def set(self, stage, order):
        half = self.root / f"{stage}.half"
        half.write_text(order)
        half.rename(self.root / "gates" / stage)

    def lift(self, stage):
        (self.root / "gates" / stage).unlink(missing_ok=True)

    def reached(self, stage):
        return sum(1 for path in (self.root / "reached").iterdir() if path.name.startswith(f"{stage}."))

    def values(self):
        return sorted(path.name for path in (self.root / "values").iterdir() if not path.name.endswith(".half"))
