"""Tier kinds: a server of each, started once, which can hang, and whose values can be replaced behind the tiers.

The servers are those of each tier's own tests.
"""

import contextlib
import importlib.util
import os
import signal
import sys
import urllib.request
from pathlib import Path

from kvtiers.cli.open_tier import anonymous_region, open_tier
from kvtiers.config import load_config

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent / "drivers"))

from common import flipped  # noqa: E402


def servers_of(plugin, file="servers"):
    """Return the module of a tier's own tests that starts its servers."""
    name = f"{plugin}_{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"plugins/{plugin}_tier/tests/{file}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_OF_SERVERS = ("connect_timeout", "timeout")
LACKS = {"memory": _OF_SERVERS, "fs": _OF_SERVERS, "memory-async": (*_OF_SERVERS, "exists_ttl", "io")}
"""Options that a type does not have: its calls go to no server, or it moves its values by itself."""


def config_of(tier, namespace, **options):
    """Return a config with this one tier."""
    common = dict.fromkeys(("deadline", "connect_timeout", "timeout"), "30s") | {"exists_ttl": "1s"} | options
    common = {name: value for name, value in common.items() if name not in LACKS.get(tier["type"], ())}
    return {
        "version": 1,
        "namespace": namespace,
        "primary": {"capacity": "8MiB", "prefault": False},
        "start_wait": "60s",
        "secondary": [tier | common],
    }


class Kind:
    """A tier kind. ``outlives``: other processes find what one has stored, also when that has ended."""

    outlives = True
    own_process = True
    """Its I/O is in a tier host, unless the config says otherwise."""
    replaces = True
    """A value that is stored again takes the place of one that was found damaged."""

    def __init__(self, folder):
        self.folder = folder

    def start(self, stack):
        """Start the server, to be ended by the stack."""

    def processes(self):
        """Return the processes that hang in an outage; none: the tier hosts of the engine."""
        return []

    def tier(self):
        """Return the options of a tier."""
        raise NotImplementedError

    def damage(self, namespace):
        """Flip bits in each value of a namespace; return how many there were."""
        with self.opened(namespace) as (store, names, room):
            for name, nbytes in names:
                assert store.read_into(name, room[:nbytes]), f"{name} cannot be read"
                value = memoryview(bytearray(flipped(bytes(room[:nbytes]))))
                store.delete([name])
                room[:nbytes] = value
                store.write(name, room[:nbytes].toreadonly())
            return len(names)

    @contextlib.contextmanager
    def opened(self, namespace):
        """Open the tier's own store; give it with the names and lengths of a namespace's values, and memory for one."""
        config = load_config(config_of(self.tier(), namespace))
        room = anonymous_region(1, 4 << 20)
        store = open_tier(config.secondary[0], namespace=namespace, value_bytes=len(room), region=room)
        try:
            found = self.listed(store, namespace)
            yield store, [(name, nbytes) for name, nbytes in found if "/_layout/" not in name], room
        finally:
            store.close()

    def listed(self, store, namespace):
        """Return name and length of each value of a namespace."""
        return [(entry.name, entry.nbytes) for entry in store.list(f"{namespace}/")]

    @contextlib.contextmanager
    def hanging(self, hosts):
        """Stop the server, or, where there is none, these tier hosts: what they were asked is not answered."""
        stopped = self.processes() or hosts
        assert stopped, "there is nothing to stop"
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):  # a tier host that hangs is killed
                    os.kill(pid, signal.SIGCONT)


class Memory(Kind):
    outlives = False

    def tier(self):
        return {"type": "memory", "capacity": "64MiB"}


class MemoryAsync(Kind):
    outlives, own_process, replaces = False, False, False

    def tier(self):
        return {"type": "memory-async", "max_blocks": 4_096}


class Files(Kind):
    def tier(self):
        return {"type": "fs", "path": str(self.folder / "fs"), "capacity": "1GiB", "min_free": 0, "processes": 1}


class Redis(Kind):
    def start(self, stack):
        self._server = servers_of("redis").Server(self.folder / "redis").start()
        stack.callback(self._server.kill)

    def processes(self):
        return [self._server.pid]

    def tier(self):
        return {"type": "redis", "url": self._server.url, "processes": 1}


class S3(Kind):
    def start(self, stack):
        servers = servers_of("s3")
        self._server = stack.enter_context(servers.Radosgw())
        where = {"endpoint": self._server.endpoint, "bucket": servers.new_bucket(self._server.endpoint)}
        keys = {"access_key": servers.ACCESS_KEY, "secret_key": servers.SECRET_KEY}
        self._tier = {
            "type": "s3",
            "region": "us-east-1",
            "threads": 4,
            "processes": 1,
            **where,
            **keys,
        }

    def processes(self):
        return [self._server.processes[-1].pid]

    def tier(self):
        return self._tier


class Gcs(Kind):
    def start(self, stack):
        servers = servers_of("gcs")
        self._server = stack.enter_context(servers.FakeGcs())
        where = {"endpoint": self._server.endpoint, "bucket": servers.new_bucket(self._server.endpoint)}
        self._tier = {"type": "gcs", "anonymous": True, "threads": 4, "processes": 1, **where}

    def processes(self):
        return [process.pid for process in self._server.processes]

    def tier(self):
        return self._tier


class Azure(Kind):
    def start(self, stack):
        servers = servers_of("azure")
        self._server = stack.enter_context(servers.Azurite())
        where = {"endpoint": self._server.endpoint, "container": servers.new_container(self._server.endpoint)}
        keys = {"account": servers.ACCOUNT, "account_key": servers.ACCOUNT_KEY}
        self._tier = {"type": "azure", "threads": 4, "processes": 1, **where, **keys}

    def processes(self):
        return [self._server.process.pid]

    def tier(self):
        return self._tier


class Mooncake(Kind):
    def start(self, stack):
        pool = servers_of("mooncake", "pool")
        self._master = pool.Master(self.folder / "mooncake", "--default_kv_lease_ttl=3000").start()
        stack.callback(self._master.kill)
        owner = pool.SegmentOwner(self._master.address, 256 << 20)
        stack.callback(owner.kill)

    def processes(self):
        return [self._master.process.pid]

    def tier(self):
        return {"type": "mooncake", "master": self._master.address}

    def listed(self, store, namespace):
        (option,) = (it for it in self._master.command if it.startswith("--metrics_port="))
        url = f"http://127.0.0.1:{option.partition('=')[2]}/get_all_keys"
        with urllib.request.urlopen(url, timeout=20) as answer:
            names = answer.read().decode().split()
        lengths = {}
        for name in names:
            if name.startswith(f"{namespace}/") and "/_layout/" not in name:
                lengths[name] = store._client.get_size(name)
        return list(lengths.items())


KINDS = {
    "memory": Memory,
    "memory-async": MemoryAsync,
    "fs": Files,
    "redis": Redis,
    "s3": S3,
    "gcs": Gcs,
    "azure": Azure,
    "mooncake": Mooncake,
}
