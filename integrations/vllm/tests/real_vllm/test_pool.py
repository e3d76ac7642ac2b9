"""A pool under real engines: what one of them stored is there after it was killed, without any tier."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtiers.api import StartError
from kvtiers.pool.loan import pool_figures

from .conftest import CHUNKS, PROMPTS, WHOLE
from .engines import TWO_RANKS, wait_until
from .ways import whole_stack


class Keeper:
    """A keeper of 64 MiB for each engine, as `kvtiers pool serve` runs it."""

    def __init__(self, path: Path, engines: int = 1) -> None:
        self.path = str(path)
        program = "from kvtiers.cli.main import main; main()"
        options = ["--size", f"{64 * engines}MiB", "--engines", str(engines), "--socket", self.path]
        with path.with_suffix(".log").open("a") as log:
            self._process = subprocess.Popen([sys.executable, "-c", program, "pool", "serve", *options], stderr=log)
        wait_until(lambda: self._process.poll() is not None or self.chunks() is not None, "the keeper does not serve")

    def chunks(self) -> int | None:
        """How many chunks the next engine would find; None: the keeper does not answer."""
        try:
            return int(pool_figures(self.path)["chunks"])
        except StartError:
            return None

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., Keeper]]:
    """Start keepers at one place, one after the other."""
    keepers: list[Keeper] = []

    def one(engines: int = 1) -> Keeper:
        keepers.append(Keeper(tmp_path / "pool.sock", engines))
        return keepers[-1]

    yield one
    for keeper in keepers:
        keeper.kill()


@pytest.mark.parametrize("ranks", [{}, TWO_RANKS], ids=["one-rank", "two-ranks"])
def test_an_engine_that_was_killed_leaves_all_it_stored_to_the_next_one(start, model, right, keep, ranks):
    keeper = keep()
    pooled = whole_stack(options={"primary": {"capacity": "1MiB", "pool": keeper.path}})
    engine = start(model, pooled, **ranks)
    assert right(engine, *PROMPTS) == [0, 0]
    engine.generate([1, 2, 3], tokens=2)  # the last stores begin in the next step
    wait_until(lambda: keeper.chunks() == CHUNKS, "what was stored is not published")
    engine.kill()

    engine = start(model, pooled, **ranks)
    assert right(engine, *PROMPTS) == WHOLE
    keeper.kill()
    assert engine.do("reset_prefix_cache")["ok"]
    assert right(engine, *PROMPTS) == WHOLE, "hits go on without a keeper"

    keeper = keep()
    wait_until(lambda: keeper.chunks() == CHUNKS, "the engine does not bring the memory to the next keeper")
    engine.kill()
    engine = start(model, pooled, **ranks)
    assert right(engine, *PROMPTS) == WHOLE
    engine.shutdown()


def test_engines_at_work_share_what_each_of_them_stored_and_whoever_is_killed(start, model, right, keep):
    keeper = keep(engines=2)
    pooled = whole_stack(options={"primary": {"capacity": "1MiB", "pool": keeper.path}})

    def finds_all(engine):
        """Of chunks of another engine's, soon: of so small a model some are computed sooner than they are checked."""
        wait_until(lambda: (keeper.chunks() or 0) >= CHUNKS, "what was stored is not published")
        assert engine.do("reset_prefix_cache")["ok"]
        return right(engine, *PROMPTS) == WHOLE

    one, other = start(model, pooled), start(model, pooled)
    assert right(one, *PROMPTS) == [0, 0]
    one.generate([1, 2, 3], tokens=2)  # the last stores begin in the next step
    wait_until(lambda: finds_all(other), "the other engine does not find it")
    one.kill()
    assert finds_all(other), "hits go on in the rows of an engine that was killed"
    one = start(model, pooled)
    assert right(one, *PROMPTS) == WHOLE
    keeper.kill()
    for engine in (one, other):
        assert engine.do("reset_prefix_cache")["ok"]
        assert right(engine, *PROMPTS) == WHOLE, "hits go on without a keeper"
    keeper = keep(engines=2)
    wait_until(lambda: (keeper.chunks() or 0) >= CHUNKS, "the engines do not bring the memory to the next keeper")
    other.kill()
    other = start(model, pooled)
    wait_until(lambda: finds_all(other), "the next engine does not find it")
    for engine in (one, other):
        engine.shutdown()


def test_an_engine_without_a_keeper_has_memory_of_its_own_and_says_so_once(start, model, right, tmp_path):
    options = {"primary": {"capacity": "64MiB", "pool": str(tmp_path / "nobody.sock")}}
    engine = start(model, whole_stack(options=options))
    assert right(engine, *PROMPTS) == [0, 0]
    assert engine.do("reset_prefix_cache")["ok"]
    assert right(engine, *PROMPTS) == WHOLE
    (line,) = engine.lines("its own, of 64MiB")
    assert "no keeper serves at" in line
    engine.shutdown()
