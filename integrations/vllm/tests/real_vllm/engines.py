"""Engines in processes of their own, each forked from a Python that has imported vLLM and has done nothing else."""

import contextlib
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATIENCE = 900.0
"""Seconds after which what an engine does has hung: its start takes three, or minutes on a machine that is twenty times
too busy. What has to be done in time is measured by its test."""
BLOCK = 32
"""Tokens in a block: the smallest that vLLM's CPU backend has."""
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
_numbers = itertools.count()
_IN_FLIGHT = re.compile("active_cascade|kvtiers_tier_(running_jobs|storing_chunks)|kvtiers_primary_pending_rows")


RELEASE = os.environ.get("VLLM_RELEASE", "")
"""The release of every engine whose test names none; empty: the environment's own."""


def release_folder(version: str) -> Path:
    """Return the folder in which another release of vLLM lies, to be put before the environment's own."""
    folder = Path(sys.prefix) / "releases" / version
    assert (folder / "vllm").is_dir(), f"vLLM {version} is not there; install it with: make test-vllm"
    return folder


def kernels() -> Path:
    """Return the folder of the environment's own vLLM, whose compiled kernels are for the CPU."""
    return Path(sysconfig.get_path("platlib")) / "vllm"


def python_path(*before: str) -> str:
    """Return the PYTHONPATH of a process of ours: these folders, then those of the tests' own."""
    return os.pathsep.join([*before, *filter(None, [os.environ.get("PYTHONPATH")])])


def environment(release: str = "", **more: str) -> dict[str, str]:
    """Return the environment of an engine's process: small, quiet, on the CPU, of this release."""
    release = release or RELEASE
    before = [str(release_folder(release))] if release else []
    if before and not (release_folder(release) / "vllm" / "_C.abi3.so").exists():
        # A build for CUDA: its Python runs on the CPU with the kernels of the environment's own release.
        more = {"VLLM_TARGET_DEVICE": "cpu", "CPU_KERNELS": str(kernels())} | more
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # that is: do; the environment is installed without
        "PYTHONPATH": python_path(str(HERE / "engine"), *before),
    } | more


def transfer_config(engine_id: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's kv_transfer_config."""
    return {
        "kv_connector": "OffloadingConnector" if "spec_name" in extra else "KvtiersConnector",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": extra,
    }


def family(session: int) -> dict[int, str]:
    """Return the processes of a session, and the command of each: tier hosts have process groups of their own."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, member_of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(member_of) == session and state not in "ZX":
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def shared_memory(session: int) -> set[Path]:
    """Return the files of shared memory that a session's processes map: a killed vLLM leaves its own behind."""
    found = set()
    for pid in family(session):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(path) for path in re.findall(r"/dev/shm/\S+", maps)}
    return found


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds; fail, with what that means, when it never does."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


class EngineError(Exception):
    """What the engine's process answered instead of a result."""


class Interpreter:
    """A Python that has imported vLLM, and forks a process for each engine: imports are most of an engine's start."""

    def __init__(self, log: Path, release: str = "") -> None:
        self._control, theirs = Pipe()
        command = [sys.executable, str(HERE / "engine" / "serve.py"), str(theirs.fileno())]
        with theirs, log.open("a") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=environment(release, VLLM_ENABLE_V1_MULTIPROCESSING="0"),
            )
        self._log = log

    def fork(self, options: dict[str, Any], env: Mapping[str, str], commands: Connection, log: Path) -> int:
        """Begin an engine with these options, which takes its commands there; return its process id."""
        with log.open("a") as output:
            self._control.send(("start", (options, dict(env))))
            for handle in (commands.fileno(), output.fileno()):
                send_handle(self._control, handle, self._process.pid)
            pid: int = self._receive()
        return pid

    def reap(self, pid: int) -> int:
        """Kill what is left of an engine's processes, and return the exit status of the engine's own."""
        self._control.send(("reap", pid))
        status: int = self._receive()
        return status

    def close(self) -> None:
        """End it, and its engines."""
        self._control.close()
        self._process.wait(PATIENCE)

    def _receive(self) -> Any:
        assert self._control.poll(PATIENCE), f"it hangs; see {self._log}"
        return self._control.recv()


class Engine:
    """One vLLM in a process of its own. ``extra``: its kv_connector_extra_config; None: no connector at all.

    ``env``: variables that its process sets before anything of kvtiers is imported in it.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        model: Path,
        log: Path,
        extra: dict[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.id = f"kvtiers-test-{os.getpid()}-{next(_numbers)}"
        options = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "seed": 0,
            "enforce_eager": True,
            "max_model_len": 2048,
            "block_size": BLOCK,
            "num_gpu_blocks_override": 512,
            "disable_log_stats": False,
        } | options
        if extra is not None:
            options["kv_transfer_config"] = transfer_config(self.id, extra)
        self.log = log
        self._interpreter = interpreter
        self._commands, theirs = Pipe()
        with theirs:
            self.pid = interpreter.fork(options, env or {}, theirs, log)
        self._ended = os.pidfd_open(self.pid)
        self._reaped = False
        self._shared: set[Path] = set()
        try:
            self._answer()
        except BaseException:
            self.kill()
            raise

    def do(self, command: str, /, **arguments: Any) -> dict[str, Any]:
        """Have the engine do something; its answer."""
        self._commands.send((command, arguments))
        return self._answer()

    def generate(self, *prompts: list[int], tokens: int = 8, **more: Any) -> tuple[list[list[int]], list[int]]:
        """Return the tokens for each prompt, and how many of its tokens were cached."""
        self.begin(*prompts, tokens=tokens, **more)
        return self.end()

    def begin(self, *prompts: list[int], tokens: int = 8, **more: Any) -> None:
        """Have it begin to answer prompts; ``end`` waits for that."""
        self._commands.send(("generate", {"prompts": list(prompts), "max_tokens": tokens, **more}))

    def end(self) -> tuple[list[list[int]], list[int]]:
        """Return what ``generate`` does, for the prompts that were begun."""
        answer = self._answer()
        return answer["tokens"], answer["cached"]

    def metrics(self) -> dict[str, float]:
        """Return the figures of vLLM's own /metrics; those of a tier as ``name{tier}``."""
        return self.do("metrics")

    def settle(self) -> None:
        """Wait until what is on its way to tiers has landed."""
        self.generate([1, 2, 3], tokens=2)  # the last stores begin in the next step
        self.wait_for(lambda figures: not any(value for name, value in figures.items() if _IN_FLIGHT.search(name)))

    def forget(self) -> None:
        """Wipe the engine's own prefix cache and its primary tier, after what is on its way to tiers has landed."""
        self.settle()
        assert self.do("reset_prefix_cache", connector=True)["ok"]

    def wait_for(self, condition: Callable[[dict[str, float]], object]) -> dict[str, float]:
        """Step the engine until its figures satisfy a condition; return them."""
        until = time.monotonic() + PATIENCE
        while not condition(figures := self.metrics()):
            assert time.monotonic() < until, f"waited in vain; the figures are {figures}"
        return figures

    def lines(self, text: str) -> list[str]:
        """Return the lines of the engine's log with this text in them."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]

    def family(self) -> dict[int, str]:
        """Return the engine's process and those that it started, and the command of each."""
        return family(self.pid)

    def hosts(self) -> list[int]:
        """Return the process ids of the engine's tier hosts."""
        return [pid for pid, command in self.family().items() if "kvtiers.host.__main__" in command]

    def shutdown(self, *, finalize: bool = False) -> None:
        """End the engine as its user would; nothing of it is left then.

        ``finalize``: its Python, too, ends as its user's would. That takes twice as long as a start.
        """
        self.do("shutdown", finalize=finalize)
        assert select.select([self._ended], [], [], PATIENCE)[0], f"it does not end; see {self.log}"
        wait_until(lambda: not self.family(), f"processes outlive their engine: {self.family()}")
        assert self._reap() == 0

    def crash(self) -> None:
        """End the engine's own process at once, and nothing else."""
        self._shared |= shared_memory(self.pid)
        signal.pidfd_send_signal(self._ended, signal.SIGKILL)

    def kill(self) -> None:
        """End the engine at once, and what it leaves behind."""
        if not self._reaped:
            self.crash()
            self._reap()

    def _reap(self) -> int:
        self._reaped = True
        status = self._interpreter.reap(self.pid)
        for path in self._shared:  # vLLM leaves its own behind when it is killed
            path.unlink(missing_ok=True)
        self._commands.close()
        os.close(self._ended)
        return status

    def _answer(self) -> dict[str, Any]:
        assert self._commands.poll(PATIENCE), f"no answer within {PATIENCE:g} s; see {self.log}"
        try:
            answer: dict[str, Any] = self._commands.recv()
        except (EOFError, ConnectionResetError):
            raise EngineError(f"the engine has ended; see {self.log}: {self.lines('Error')[-1:]}") from None
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer
