"""The scenes: what is done with an integration over a tier kind, and what must come out. Written once for all of them.

A cell's scenes follow each other and share engines: with vLLM, a start takes longer than all that is then done with it.

What is found is right in every scene: wrong bytes and wrong tokens fail it. One that does not apply to a cell raises
``DoesNotApply`` with the reason, and one that works with a limit returns it as a sentence: both stand in the table.
"""

import contextlib
import dataclasses
import itertools
import time
from pathlib import Path

from kinds import config_of

from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.storage_name import StorageNames, parse_name

PATIENCE = 90.0
OWN, OTHER = "own-weights", "other-weights"
QUICK = {"deadline": "2s", "grace": "500ms", "breaker": {"delay": "100ms", "max_delay": "500ms"}}
QUICK |= dict.fromkeys(("connect_timeout", "timeout"), "1s")
AN_OUTAGE = 45.0
"""Seconds in which two calls on a store that hangs have ended, on a busy machine, too; a hang takes far longer."""
MEMORY = "its values lie in the memory of one engine, and end with it"
KEPT = "a damaged value stays a miss until it is evicted: a tier that moves its values by itself keeps what it has"


class DoesNotApply(Exception):
    """The reason for which a scene is not played in a cell."""


class Cell:
    """An integration over a kind: two worker processes, and the engines that the scenes have opened in them."""

    _numbers = itertools.count()

    def __init__(self, integration, kind, workers, engines, **options):
        """``options``: of each tier, besides those of the scenes."""
        self.options = options
        self.integration, self.kind, self.workers = integration, kind, workers
        self.other_engines = engines
        """The engine names that other integrations state."""
        self.namespace = f"d{next(self._numbers)}-{integration}"
        self._opened = {}

    def engine(self, worker=0, weights=OWN, **options):
        """Return the engine that is open with these options; it is opened where none is."""
        options = self.options | options
        key = (worker, weights, repr(sorted(options.items())))
        if key not in self._opened:
            name = f"{self.namespace}-{len(self._opened)}-{next(self._numbers)}"
            config = config_of(self.kind.tier(), self.namespace, **options)
            self.workers[worker].ask("open", name=name, config=config, weights=weights)
            self._opened[key] = Engine(self.workers[worker], name)
        return self._opened[key]

    def close(self, but=None):
        """Close all engines that are open, but this one."""
        for key, engine in [*self._opened.items()]:
            if engine is not but:
                del self._opened[key]
                engine.close()

    def elsewhere(self):
        """Begin with values of its own, apart from those of the scenes before."""
        self.close()
        self.namespace = f"d{next(self._numbers)}-{self.integration}"


class Engine:
    """An engine in a worker."""

    def __init__(self, worker, name):
        self.worker, self.name = worker, name

    def put(self, seed):
        return self.worker.ask("put", name=self.name, seed=seed)

    def begin_put(self, seed):
        self.worker.send("put", name=self.name, seed=seed)

    def get(self, seed):
        """Return how many of the prompt's values were loaded. AssertionError if one of them is wrong."""
        got = self.worker.ask("get", name=self.name, seed=seed)
        assert not got["wrong"], f"wrong: {got}"
        self.of = got["of"]
        return got["found"]

    def finds(self, seed):
        """Wait until all values of a prompt are found: what another process has stored is seen a moment later."""
        until = time.monotonic() + PATIENCE
        while (found := self.get(seed)) != self.of:
            assert time.monotonic() < until, f"{found} of {self.of} values are found"

    def stores(self, seed, otherwise):
        """Store a prompt until all of it is found, at most for a while; ``otherwise``: what it means if it is not."""
        until = time.monotonic() + PATIENCE
        while self.get(seed) != self.of:
            self.put(seed)
            assert time.monotonic() < until, otherwise

    def inside(self, what):
        return self.worker.ask(what, name=self.name)

    def close(self):
        self.worker.ask("close", name=self.name)


# -- the scenes, in the order in which they are played


def cold(cell):
    """A store without values: nothing is found, and nothing is wrong."""
    assert cell.engine().get(1) == 0


def warm(cell):
    """What an engine has stored is found by itself, from the tier."""
    engine = cell.engine()
    engine.put(2)
    engine.finds(2)


def wrong_identity(cell):
    """Values of other weights, and of every other engine with all else equal, are misses; its own are found."""
    if not cell.kind.outlives:
        raise DoesNotApply(MEMORY)  # to look for them elsewhere would show nothing
    own = cell.engine()
    own.put(3)
    other = cell.engine(weights=OTHER)
    assert other.get(3) == 0, "values of other weights were found"
    own.finds(3)
    _try_as_other_engines(cell, own)


def _try_as_other_engines(cell, own):
    """Read each stored value raw, and check it as this engine and each other one would, under its name there."""
    from kvtiers.layout.seal import SealVerdict, check_value

    layouts = {}
    for text in own.inside("layouts"):
        layout = CacheLayout.from_json(text)
        layouts[StorageNames.of_layout(cell.namespace, layout).prefix] = layout
    tried = 0
    with cell.kind.opened(cell.namespace) as (store, names, room):
        for name, nbytes in names:
            parsed = parse_name(name)
            layout = layouts.get(name[: name.rindex("/") + 1])
            if parsed is None or layout is None:
                continue  # of the other weights
            last = name.rpartition("/")[2]
            group = int.from_bytes(parsed.key[-4:], "big")
            assert store.read_into(name, room[:nbytes])
            names_here = StorageNames.of_layout(cell.namespace, layout)
            verdict = check_value(room[:nbytes], layout.payload_bytes(group), name, names_here.layout_id)
            assert verdict is SealVerdict.OK, "the control: as its own it is sound"
            for engine in cell.other_engines:
                model = dataclasses.replace(layout.model, engine=engine)
                there = StorageNames.of_layout(cell.namespace, dataclasses.replace(layout, model=model))
                its_name = there.prefix + last
                assert its_name != name, f"{engine} would look under the same name"
                assert not store.exists([its_name])[0], f"{engine} would find it"
                for under in (name, its_name):
                    verdict = check_value(room[:nbytes], layout.payload_bytes(group), under, there.layout_id)
                    assert verdict is not SealVerdict.OK, f"{engine} would take the value"
            tried += 1
    assert tried, f"no value was tried: {len(names)} are stored, {len(layouts)} layouts are known"


def concurrent_writers(cell):
    """Two processes store the same prompts, and others, at the same time: each finds all, and all of it is right."""
    engines = [cell.engine(worker=0), cell.engine(worker=1)]
    stored = [(5, 6), (5, 7)]
    for round_ in zip(*stored, strict=True):
        for engine, seed in zip(engines, round_, strict=True):
            engine.begin_put(seed)
        for engine in engines:
            engine.worker.receive()
    for engine, own in zip(engines, stored, strict=True):
        for seed in (5, 6, 7) if cell.kind.outlives else own:
            engine.finds(seed)


def restart(cell):
    """What an engine has stored before it ended is found by another process, and by the next engine."""
    if not cell.kind.outlives:
        raise DoesNotApply(MEMORY)
    elsewhere = cell.engine(worker=1)
    cell.engine().put(4)
    cell.close(but=elsewhere)
    elsewhere.finds(4)
    cell.engine(worker=1, **QUICK).finds(4)  # opened where the writer never was


def damage(cell):
    """Bits flipped in every stored value: all of them are misses, and are found again when they are stored again."""
    if not cell.kind.outlives:
        cell.elsewhere()
    # Where only the engine's own process can get at the values, its tier runs there.
    engine = cell.engine(worker=1, **QUICK) if cell.kind.outlives else cell.engine(io="thread")
    before = _count(cell, engine)
    engine.stores(8, "the store is not filled")  # a busy machine may take longer than a deadline
    stored = _count(cell, engine)
    assert stored - before >= engine.of, f"{stored - before} values are new, expected {engine.of} at least"
    damaged = cell.kind.damage(cell.namespace) if cell.kind.outlives else engine.inside("damage")
    assert damaged >= stored, f"{damaged} values are damaged of {stored}"
    assert engine.get(8) == 0, "damaged values were found"
    if not cell.kind.replaces:
        engine.put(8)
        assert engine.get(8) == 0, "the note below is not true any more"
        return KEPT
    engine.stores(8, "what was stored again is not found")
    return ""


def _count(cell, engine):
    """Return how many values are stored."""
    if not cell.kind.outlives:
        return engine.inside("count")
    with cell.kind.opened(cell.namespace) as (_, names, _):
        return len(names)


def outage(cell):
    """The store, or the process that does its I/O, hangs: calls end, as misses; hits come back when it does."""
    if not (cell.kind.own_process or cell.kind.processes()):
        raise DoesNotApply("its I/O is in the engine's own process: nothing can hang without the engine")
    if not cell.kind.outlives:
        cell.elsewhere()
    engine = cell.engine(worker=1, **QUICK)
    engine.stores(9, "the store is not filled")
    with cell.kind.hanging(hosts_of(engine.worker.pid)):
        begin = time.monotonic()
        engine.get(9)
        engine.put(10)
        seconds = time.monotonic() - begin
        assert seconds < AN_OUTAGE, f"two calls took {seconds:.0f} s"
        assert engine.get(11) == 0, "values were found that were never stored"
    engine.stores(9, "hits do not come back")


def hosts_of(pid):
    """Return the tier hosts of a process and of its children."""
    family = [pid]
    for member in family:  # which grows meanwhile
        with contextlib.suppress(OSError):  # it has ended
            for task in Path(f"/proc/{member}/task").iterdir():
                family += map(int, (task / "children").read_text().split())
    return [member for member in family if b"kvtiers.host.__main__" in _command(member)]


def _command(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


SCENES = {
    "cold": cold,
    "warm": warm,
    "wrong identity": wrong_identity,
    "concurrent writers": concurrent_writers,
    "restart": restart,
    "damage": damage,
    "outage": outage,
}
