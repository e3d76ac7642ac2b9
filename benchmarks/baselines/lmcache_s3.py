"""LMCache's S3 connector, in a process of its own and with any Python that has it: it wants other packages than we.

It asks for ``/name`` of a host that is the bucket's, and has no other address: a server that is given the bucket by
the path, as Ceph's gateway is here, takes the name for a bucket's. The trivial server takes any path. So one value goes
there and back before the lane begins, and what fails then is why the lane is left out.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from lib.processes import processor_seconds

INSTALL = (
    "pip install torch aiofile aiohttp awscrt cachetools cryptography msgspec numba prometheus_client psutil py-cpuinfo"
    " pyyaml pyzmq requests sortedcontainers transformers && pip install --no-deps lmcache"
)
"""What it imports, without the packages for CUDA that its own asks for; torch may be a build for processors alone."""


class LeftOutError(Exception):
    """The connector cannot be measured here; the message says why."""


class LMCacheS3:
    """The process: it moves values of one size, from and to memory for so many."""

    def __init__(self, python: str, endpoint: str, keys: tuple[str, str], nbytes: int, count: int) -> None:
        script = Path(__file__).with_name("lmcache_s3_process.py")
        arguments = json.dumps([endpoint.removeprefix("http://"), *keys, nbytes, count])
        try:
            self._process = subprocess.Popen(
                [python, "-P", str(script), arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # it logs each failure, and the reason of the first one is printed
                env=os.environ | {"LMCACHE_LOG_LEVEL": "ERROR"},
                text=True,
            )
        except OSError as error:
            raise LeftOutError(str(error)) from None

    def __enter__(self) -> Self:
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def move(self, way: str, numbers: Sequence[int]) -> None:
        """Write values under keys with these numbers, or read them."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([way, numbers]) + "\n")
        self._process.stdin.flush()
        self._answer()

    def cpu_seconds(self) -> float:
        """Return the processor time that it has taken."""
        return processor_seconds(self._process.pid)

    def _answer(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LeftOutError(f"its process ended with status {self._process.wait()}")
        if problem := json.loads(line):
            raise LeftOutError(problem)
