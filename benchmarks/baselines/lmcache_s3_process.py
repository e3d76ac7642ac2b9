"""LMCache's S3 connector, driven as LMCache's engine drives it; ``lmcache_s3.py`` runs this, with a Python that has it.

LMCache's own adapter makes it, with the adapter's defaults but for TLS. Each value written is a call of `put`, of which
it has four in flight at a time; all that is read is one `batched_get`, which starts everything. The memory for both is
taken once and used in turn, so that what LMCache's allocator takes is in no figure.

A line of stdin is what to move, a line of stdout what went wrong, or null.
"""

import asyncio
import itertools
import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

TOKENS = 256  # of a chunk, as LMCache has it by default
WHERE = {"s3_region": "us-east-1", "disable_tls": True, "save_chunk_meta": False}


class Driver:
    """The connector, on a loop of its own."""

    def __init__(self, endpoint: str, access_key: str, secret_key: str, nbytes: int, count: int) -> None:
        # What is missing is an answer, and not the end.
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.connector import ConnectorContext, s3_connector
        from lmcache.v1.storage_backend.connector.s3_adapter import S3ConnectorAdapter

        self._problems: list[str] = []  # it logs what fails, and raises nothing
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: self._problems.append(record.getMessage())  # type: ignore[method-assign]
        s3_connector.logger.addHandler(handler)

        item = torch.bfloat16
        shape = (1, 2, TOKENS, nbytes // (2 * TOKENS * item.itemsize), 1)
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, item, shape, chunk_size=TOKENS)
        shapes = metadata.get_shapes()
        self._value = os.urandom(nbytes)
        values = torch.frombuffer(bytearray(self._value), dtype=torch.uint8).repeat(count, 1)

        def chunk(value: Any) -> Any:
            about = {"fmt": MemoryFormat.KV_2LTD, "shapes": shapes, "dtypes": [item]}
            return TensorMemoryObj(value, MemoryObjMetadata(shapes[0], item, 0, nbytes, 1, **about), None)

        self._chunks = itertools.cycle([chunk(value) for value in values])
        self._key = lambda number: CacheEngineKey("bench", 1, 0, number, item)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        secrets = {"aws_access_key_id": access_key, "aws_secret_access_key": secret_key}
        config = SimpleNamespace(extra_config=WHERE | secrets, use_layerwise=False)
        memory = SimpleNamespace(config=config, metadata=metadata, allocate=lambda *_: next(self._chunks))
        context = ConnectorContext(f"s3://{endpoint}", self._loop, memory, config, metadata)
        self._connector = S3ConnectorAdapter().create_connector(context)

    def try_one(self) -> None:
        """Write a value and read it back, into memory that holds something else."""
        self.write([0])
        into = next(self._chunks)
        into.raw_data.zero_()
        self._chunks = itertools.chain([into], self._chunks)
        [found] = self.read([0])
        self._require(bytes(found.byte_array) == self._value, "what was read is not what was written")

    def write(self, numbers: Sequence[int]) -> None:
        """Write the next chunks of memory under these keys."""
        keys = [self._key(number) for number in numbers]

        async def put_all() -> None:
            await asyncio.gather(*(self._connector.put(key, next(self._chunks)) for key in keys))

        self._run(put_all())
        written = self._connector.object_size_cache
        self._require(all(key.to_string() in written for key in keys), "what was written is not there")

    def read(self, numbers: Sequence[int]) -> list[Any]:
        """Return the chunks of memory that the values of these keys were read into."""
        found = self._run(self._connector.batched_get([self._key(number) for number in numbers]))
        self._require(None not in found, "what was written cannot be read")
        return found

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _require(self, done: bool, otherwise: str) -> None:
        if not done:
            raise RuntimeError(self._problems[0] if self._problems else otherwise)


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer

    def answer(problem: Exception | None) -> None:
        text = problem and (str(problem).splitlines() or [type(problem).__name__])[0]
        print(json.dumps(text), file=answers, flush=True)

    try:
        driver = Driver(*json.loads(sys.argv[1]))
        driver.try_one()
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is the answer
        answer(error)
        return
    answer(None)
    for line in sys.stdin:
        way, numbers = json.loads(line)
        try:
            (driver.write if way == "write" else driver.read)(numbers)
        except Exception as error:  # noqa: BLE001 -- the same
            answer(error)
        else:
            answer(None)


if __name__ == "__main__":
    main()
