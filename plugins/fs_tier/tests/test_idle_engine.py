"""A disk that is full and then has room beside an idle engine: what is said of it is true without a request."""

import contextlib
import threading
import time

import pytest
from tests.integration.hosts.harness import Engine, keys

from kvtiers.control import ControlSocket

PATIENCE = 60.0
HALF_A_MINUTE = 31.0  # and some


@pytest.fixture
def idle(folder, mounted):
    """An engine over a small disk that steps only when woken, as vLLM does; its control socket tends its tiers."""
    mounted("tmpfs", "size=4m,mode=0700")
    engine = Engine({"type": "fs", "path": str(folder.path), "capacity": "64MiB", "min_free": 0, "io": "thread"})
    woken, is_over = threading.Event(), threading.Event()

    def steps():
        while not is_over.is_set():
            woken.wait()
            woken.clear()
            engine.until_idle()

    engine.until_available()
    engine.manager.commands.wake = woken.set
    thread = threading.Thread(target=steps)
    control = ControlSocket({}, tend=engine.manager.tend)
    yield engine, thread
    control.close()
    is_over.set()
    woken.set()
    thread.join()
    engine.close()


def own(engine):
    return engine.manager.stats()["tiers"]["fs"]["own"]


def wait_until(condition, what):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"{what} does not happen"
        time.sleep(0.02)


def test_an_idle_engine_notices_that_its_full_disk_has_room_and_stores_what_it_did_not_take(idle, folder, caplog):
    engine, thread = idle
    others = folder.path / "others"
    with contextlib.suppress(OSError):  # all that there is: nothing of the tier's is there to give way
        others.write_bytes(b"x" * (8 << 20))
    engine.store(keys(0, 3))
    assert own(engine)["full"] == 1
    thread.start()  # from here on it is idle
    dropped = own(engine)["dropped_full"]
    engine.wind(HALF_A_MINUTE)
    wait_until(lambda: own(engine)["dropped_full"] > dropped, "another try")
    assert own(engine)["full"] == 1, "it was tried, and is full"
    others.unlink()
    engine.wind(HALF_A_MINUTE)
    wait_until(lambda: own(engine)["full"] == 0, "its having room")
    wait_until(lambda: "fs: takes values again" in caplog.text, "the line that says so")
    stored = lambda: engine.manager.stats()["tiers"]["fs"]["stored_chunks"]  # noqa: E731
    wait_until(stored, "its storing one")
    assert stored() == 1, "the last one of those that it had not taken"
