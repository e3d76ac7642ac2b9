"""Chaos over all tier kinds: processes killed and stopped, the engine's too, servers gone, a disk full, lying replies.

``python tests/soak/soak.py --minutes 5``. Every byte is compared. Exit status 1: a wrong byte, a stall of the engine's
thread of more than 50 ms over its control's (an engine without tiers, beside it), a call of it that does not return,
something left behind, nothing compared, a tier kind from which nothing was loaded in minutes, or a part that cannot run
here and was not left out by name (``--without``).
"""

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from kvtiers.testing.ports import free_port

HERE = Path(__file__).parent
PLUGINS = HERE.parents[1] / "plugins"
S3_SERVER = PLUGINS / "s3_tier/tests/trivial.py"
MARK = "KVTIERS_SOAK"
STALL = 0.050
SILENCE = 30.0
"""Seconds without a line of an engine, which makes one a second: a call of its thread does not return."""
PARTS = {
    "redis": "no redis-server here",
    "sentinel": "no redis-sentinel here",
    "full-disk": "no file system may be mounted here",
    "azure": "no Azurite here: 'make emulators'",
}
LONG = 120.0
"""Seconds of a soak after which each tier kind must have been loaded from."""
PRIMARY = {"capacity": "8MiB", "prefault": False}
WAITS = {"lookup_wait": "50ms", "load_wait": "300ms"}
KINDS = {
    *("memory", "fs", "slab", "liar", "managed-liar", "redis", "sentinel", "cluster", "s3", "gcs", "azure", "mooncake"),
}
AT_ONCE = 6
"""Tiers of one engine. Each kind has its turn before one has a second: in five minutes in some five engines of ten."""
BUCKET = {"timeout": "1s", "threads": 4}
SLAB = {"capacity": "8MiB", "min_free": 0}
MANAGED = {"deadline": "2s"}
QUICK = {"deadline": "2s", "grace": "500ms", "breaker": {"delay": "100ms", "max_delay": "1s"}}


class Server:
    """A server that can be killed, stopped for a while, and started again; it has forgotten everything then."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end(self):
        self.process.kill()
        self.process.wait()

    close = end


class Redis(Server):
    def command(self):
        options = ["--port", str(self.port), "--save", "", "--dir", str(self.folder), "--maxmemory", "16mb"]
        options += ["--maxmemory-policy", "noeviction" if random.random() < 0.5 else "allkeys-lru"]
        return ["redis-server", *options]

    def tier(self):
        return {"type": "redis", "url": f"redis://127.0.0.1:{self.port}", "timeout": "1s"}


def servers_of(path):
    """Return the module of a tier's own tests that starts its servers."""
    spec = importlib.util.spec_from_file_location(f"soak_{path.replace('/', '_')}", PLUGINS / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Sentinel:
    """A master, a replica, and Sentinels that replace a master which is gone for long enough; ``process`` is the first.

    It is the Redis tier's tests' own.
    """

    def __init__(self, folder):
        self._all = servers_of("redis_tier/tests/servers").Sentinels(folder / "sentinel").start()

    @property
    def process(self):
        return self._all.master.process

    def start(self):
        self._all.master.start()

    def end(self):
        self._all.master.kill()

    def close(self):
        self._all.stop()

    def tier(self):
        where = {"url": self._all.url, "topology": "sentinel", "master": self._all.name}
        return {"type": "redis", "name": "sentinel", **where, "timeout": "1s"}


class Cluster:
    """Three masters of a Redis Cluster, each with a replica that takes over; ``process``: a node's, another each time.

    It is the Redis tier's tests' own.
    """

    def __init__(self, folder):
        self.servers = servers_of("redis_tier/tests/servers").Cluster(folder / "cluster", replicas=1).start()
        self._ended = self.servers.nodes[0]

    @property
    def process(self):
        return random.choice(self.servers.nodes).process

    def start(self):
        self._ended.start()

    def end(self):
        self._ended = random.choice(self.servers.nodes)
        self._ended.kill()

    def close(self):
        for node in self.servers.nodes:
            node.kill()

    def tier(self):
        return {"type": "redis", "name": "cluster", "url": self.servers.url, "topology": "cluster", "timeout": "1s"}


class S3(Server):
    def command(self):
        return [sys.executable, str(S3_SERVER), str(self.port)]

    def tier(self):
        where = {"endpoint": f"http://127.0.0.1:{self.port}", "bucket": "bucket", "region": "us-east-1"}
        return {"type": "s3", **where, "access_key": "a", "secret_key": "b", "timeout": "1s", "threads": 4}


class Emulator:
    """An emulator of an object store, started again with what it has kept. It is the tier's tests' own."""

    def __init__(self, path, name, number):
        self._module = servers_of(path)
        self._all = getattr(self._module, name)(keeps=True).__enter__()
        self._number = number

    @property
    def process(self):
        return self._number(self._all)

    def start(self):
        self._all.start()

    def end(self):
        self._all.stop()

    def close(self):
        self._all.__exit__()


class Gcs(Emulator):
    def __init__(self, _folder):
        super().__init__("gcs_tier/tests/servers", "FakeGcs", lambda all_: random.choice(all_.processes))
        self._bucket = self._module.new_bucket(self._all.endpoint)

    def tier(self):
        return {"type": "gcs", "endpoint": self._all.endpoint, "bucket": self._bucket, "anonymous": True} | BUCKET


class Azure(Emulator):
    def __init__(self, _folder):
        super().__init__("azure_tier/tests/servers", "Azurite", lambda all_: all_.process)
        self._container = self._module.new_container(self._all.endpoint)

    def tier(self):
        account = {"account": self._module.ACCOUNT, "account_key": self._module.ACCOUNT_KEY}
        where = {"endpoint": self._all.endpoint, "container": self._container}
        return {"type": "azure", **where, **account} | BUCKET


class Mooncake:
    """A pool: its master, which is ``process``, and a process that has a segment. It is the tier's tests' own."""

    def __init__(self, folder):
        pool = servers_of("mooncake_tier/tests/pool")
        self._master = pool.Master(folder / "mooncake").start()
        self._owner = pool.SegmentOwner(self._master.address, 64 << 20)

    @property
    def process(self):
        return self._master.process

    def start(self):
        self._master.start()

    def end(self):
        self._master.kill()

    def close(self):
        self._master.kill()
        self._owner.kill()

    def tier(self):
        return {"type": "mooncake", "master": self._master.address}


class Disk:
    """A small file system of its own, where one may be mounted; else a folder, and no full disk."""

    def __init__(self, folder):
        self.path = folder / "disk"
        self.path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(self.path)]
        self.is_mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
        self.filler = self.path / "filler"

    def fill(self):
        with contextlib.suppress(OSError), self.filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))

    def relieve(self):
        self.filler.unlink(missing_ok=True)

    def end(self):
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=True)


class Engine:
    """An engine in a process of its own. ``lines``: what it has said; ``silence``: how long it may say nothing."""

    silence = SILENCE

    def __init__(self, config, seconds, environment, program=HERE / "engine.py"):
        self.lines, self.wrong = [], []
        self.heard = time.monotonic()
        self.hangs = False
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by ``end``
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(seconds), json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            if line.endswith("\n"):
                self.heard = time.monotonic()
                said = json.loads(line)
                (self.wrong if "row" in said else self.lines).append(said)

    @property
    def last(self):
        return self.lines[-1] if self.lines else {}

    def look(self):
        """End the engine, with the stacks of its threads in its log, if it has been silent for too long."""
        if self.process.poll() is None and time.monotonic() - self.heard > self.silence and not self.hangs:
            self.hangs = True
            # In this order: one that goes on first may have come to its end when the second arrives.
            self.process.send_signal(signal.SIGABRT)  # see engine.py
            self.process.send_signal(signal.SIGCONT)

    def hosts(self):
        found = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found

    def end(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        self.log.seek(0)
        self.said = self.log.read().decode(errors="replace")
        self.log.close()


class Soak:
    def __init__(self, folder, minutes, seed):
        self.folder = folder
        self.until = time.monotonic() + 60 * minutes
        self.random = random.Random(seed)
        self.did, self.totals, self.ids, self.worst, self.control_worst = Counter(), Counter(), set(), (0.0, ""), 0.0
        self.wrong, self.stuck = [], []
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.disk = Disk(folder)
        self.seconds = 60 * minutes
        self.redis = Redis(folder) if shutil.which("redis-server") else None
        self.sentinel = Sentinel(folder) if self.redis and shutil.which("redis-sentinel") else None
        self.cluster = Cluster(folder) if self.redis else None
        self.azure = Azure(folder) if has_azurite() else None
        some = self.redis, self.sentinel, self.cluster, self.azure, S3(folder), Gcs(folder), Mooncake(folder)
        self.servers = [server for server in some if server]
        self.deck = []
        self.environment = os.environ | {MARK: self.mark, "PYTHONPATH": self.install_liar()}

    def install_liar(self):
        site = self.folder / "site"
        info = site / "kvtiers_soak-1.0.dist-info"
        info.mkdir(parents=True)
        shutil.copy(HERE / "liar.py", site / "kvtiers_soak_liar.py")
        shutil.copy(HERE / "managed_liar.py", site / "kvtiers_soak_managed_liar.py")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtiers-soak\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[kvtiers.tiers]\nliar = kvtiers_soak_liar\nmanaged-liar = kvtiers_soak_managed_liar\n"
        )
        return os.pathsep.join([str(site), *filter(None, sys.path)])

    def tiers(self):
        liar = self.folder / "liar"
        liar.mkdir(exist_ok=True)
        tiers = [
            {"type": "memory", "capacity": "8MiB", "io": "process"},
            {"type": "fs", "path": str(self.disk.path / "values"), "capacity": "1GiB", "min_free": 0},
            {"type": "fs", "name": "slab", "layout": "slab", "path": str(self.disk.path / "slab"), **SLAB},
            {"type": "liar", "root": str(liar)},
            {"type": "managed-liar", "max_blocks": 200},
        ]
        tiers += [server.tier() for server in self.servers]
        tiers = {tier.get("name", tier["type"]): tier for tier in tiers}
        while len(self.deck) < AT_ONCE:
            again = [name for name in tiers if name not in self.deck]
            self.random.shuffle(again)
            self.deck += again
        now, self.deck = self.deck[:AT_ONCE], self.deck[AT_ONCE:]
        tiers = [tiers[name] for name in now]
        return [(MANAGED if tier["type"] == "managed-liar" else QUICK) | tier for tier in tiers]

    # -- what is done to it

    def kill_a_host(self, engine):
        self._signal(engine, signal.SIGKILL)

    def stop_a_host(self, engine):
        pid = self._signal(engine, signal.SIGSTOP)
        time.sleep(self.random.uniform(0.1, 3.0))
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def stop_the_engine(self, engine):
        engine.process.send_signal(signal.SIGSTOP)
        time.sleep(self.random.uniform(0.1, 5.0))
        engine.process.send_signal(signal.SIGCONT)

    def kill_a_server(self, _engine):
        server = self.random.choice(self.servers)
        server.end()
        time.sleep(self.random.uniform(0.0, 2.0))
        server.start()

    def stop_a_server(self, _engine):
        process = self.random.choice(self.servers).process
        process.send_signal(signal.SIGSTOP)
        time.sleep(self.random.uniform(0.1, 3.0))
        process.send_signal(signal.SIGCONT)

    def fill_the_disk(self, _engine):
        self.disk.fill()
        time.sleep(self.random.uniform(0.2, 2.0))
        self.disk.relieve()

    def rest(self, _engine):
        time.sleep(self.random.uniform(0.2, 2.0))

    def _signal(self, engine, number):
        hosts = engine.hosts()
        if not hosts:
            return 0
        pid = self.random.choice(hosts)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    def actions(self):
        actions = [self.kill_a_host, self.stop_a_host, self.stop_the_engine, self.rest]
        actions += [self.kill_a_server, self.stop_a_server]
        return actions + ([self.fill_the_disk] if self.disk.is_mounted else [])

    # -- rounds

    def run(self):
        config = {"version": 1, "primary": PRIMARY, **WAITS}
        control = Engine(config, 60 * 600, self.environment)
        try:
            while (left := self.until - time.monotonic()) > 0:
                self.round(min(left, self.random.uniform(15, 40)), config)
                self.look_at(control)
            self.control_worst = control.last.get("stall", 0.0)
        finally:
            control.end()
            self.ids |= {line["engine"] for line in control.lines}

    def round(self, seconds, config):
        """Run one engine under chaos; half of them are killed, the others end by themselves."""
        engine = Engine(config | {"secondary": self.tiers()}, seconds, self.environment)
        until = time.monotonic() + seconds
        while time.monotonic() < until and engine.process.poll() is None:
            action = self.random.choice(self.actions())
            action(engine)
            self.did[action.__name__] += 1
            self.look_at(engine)
        if self.random.random() < 0.5:
            self.did["kill_the_engine"] += 1
        else:
            try:
                engine.process.wait(60)
            except subprocess.TimeoutExpired:
                self.stuck.append("an engine did not end within 60 s of its shutdown")
        status = engine.process.poll()
        engine.end()
        if engine.hangs:
            print(engine.said[-5000:], file=sys.stderr)
        if status not in {None, 0}:
            self.stuck.append(f"an engine ended by itself with status {status}: {engine.said[-500:]}")
        self.note(engine)

    def look_at(self, engine):
        engine.look()
        if engine.hangs:
            self.stuck.append(
                f"a call of the engine's thread has not returned for {engine.silence:g} s; its stack is below"
            )

    def note(self, engine):
        last = engine.last
        self.ids |= {line["engine"] for line in engine.lines}
        self.wrong += engine.wrong
        self.totals.update({name: last.get(name, 0) for name in ("compared", "stored", "hits", "left")})
        for what in ("landed", "damaged"):
            self.totals.update({f"{what} {name}": count for name, count in last.get(what, {}).items()})
        self.worst = max(self.worst, (last.get("stall", 0.0), last.get("call", "")))
        print(f"{max(0.0, self.until - time.monotonic()):5.0f} s left: {dict(self.totals)}", flush=True)

    def end(self):
        self.disk.end()
        for server in self.servers:
            server.close()

    # -- what is left

    def leftovers(self):
        """Return what engines that are gone have left; dying takes a moment, so it is looked at for some seconds."""
        until = time.monotonic() + 20
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(0.2)
        return left

    def left(self):
        left = []
        for process in Path("/proc").iterdir():
            if not process.name.isdecimal() or int(process.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (process / "environ").read_bytes():
                    left.append(f"process {process.name}: {(process / 'cmdline').read_bytes()!r:.120}")
            with contextlib.suppress(OSError):
                maps = (process / "maps").read_text()
                left += [f"process {process.name} maps the memory of {name}" for name in self.ids if name in maps]
        sockets = Path("/proc/net/unix").read_text()
        left += [f"a socket of {name}" for name in self.ids if name in sockets]
        for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
            left += [str(path) for path in folder.iterdir() if any(name in path.name for name in self.ids)]
        return left


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--without", action="append", default=[], choices=PARTS, help="a part that may be left out")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    options = parser.parse_args()
    print(f"soak of {options.minutes:g} minutes, --seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), options.minutes, options.seed)
        try:
            soak.run()
        finally:
            soak.end()
        left = soak.leftovers()
    return report(soak, left, options.without)


def report(soak, left, without=()):
    stall, call = soak.worst
    allowed = soak.control_worst + STALL
    print(f"did: {dict(soak.did)}")
    missing = not_done(soak)
    print(f"not done: {', '.join(f'{part} ({PARTS[part]})' for part in missing) or 'nothing'}")
    without_redis = {"cluster"} if "redis" in missing else set()
    unloaded = sorted(name for name in KINDS - set(missing) - without_redis if not soak.totals[f"landed {name}"])
    print(f"not loaded from: {', '.join(unloaded) or 'none'}")
    print(f"compared {soak.totals['compared']} chunks, {len(soak.wrong)} with a wrong byte {soak.wrong[:3]}")
    print(
        f"worst call of the engine's thread: {stall * 1e3:.1f} ms ({call}); control: {soak.control_worst * 1e3:.1f} ms"
    )
    print(f"left behind: {left or 'nothing'}; other trouble: {soak.stuck or 'none'}")
    is_idle = not soak.totals["compared"] or len(unloaded) == len(KINDS) or bool(unloaded and soak.seconds >= LONG)
    failed = bool(soak.wrong or left or soak.stuck or set(missing) - set(without)) or stall > allowed or is_idle
    print("FAILED" if failed else "ok")
    return int(failed)


def has_azurite():
    """Return whether Azurite is installed here."""
    try:
        servers_of("azure_tier/tests/servers").azurite()
    except RuntimeError:
        return False
    return True


def not_done(soak):
    """Return the parts that could not run here."""
    ran = {
        "redis": soak.redis, "sentinel": soak.sentinel, "full-disk": soak.disk.is_mounted, "azure": soak.azure,
    }  # fmt: skip
    return [part for part, it in ran.items() if not it]


if __name__ == "__main__":
    sys.exit(main())
