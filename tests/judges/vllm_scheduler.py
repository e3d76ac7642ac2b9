"""vLLM's tests of its offloading connector's scheduler (``test_scheduler.py``) over kvtiers' manager.

vLLM's mock of a manager is told by each test what is offloaded. Here that is made true first: chunks that are to be a
hit are stored in kvtiers' primary, and those that are to be a miss are removed from it. Then ``KvtiersManager`` is
asked, and its answer is the one that vLLM's scheduler gets; a test where the two differ fails. RETRY and HIT_PENDING
stay the mock's: they are those of a tier, and of a copy that vLLM's own worker would make.

Stores, loads, the ends of copies and of requests, and resets go to kvtiers, too. At the end of a test nothing may have
been misused, and nothing may have been raised.
"""

import functools
import json
import logging
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import tests.v1.kv_connector.unit.offloading_connector.utils as vllm_utils
import tests.v1.kv_connector.unit.utils as vllm_unit
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import LookupResult, PrepareStoreOutput, ScheduleEndContext

from kvtiers.primary.tier import CPUPrimaryTier
from kvtiers.tiering.manager import TieringManager
from kvtiers_vllm.engine import CoreLink
from kvtiers_vllm.stack.adapter_digests import AdapterDigests
from kvtiers_vllm.stack.keys import GroupKeys
from kvtiers_vllm.stack.manager import KvtiersManager
from kvtiers_vllm.stack.plans import CopyReport
from kvtiers_vllm.stack.requests import RequestBook, Weights
from kvtiers_vllm.stack.steps import StepClock

__all__ = ["call"]

ROWS, ROW_BYTES = 20_000, 16
MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
}
"""Of the model that the suite would fetch: vLLM asks for its config alone."""
NO_ONE = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
PLAIN = {"cache_salt": None, "lora_request": None, "trace_headers": None, "arrival_time": 0.0, "num_output_tokens": 0}
"""Attributes that kvtiers reads of a request."""
FOLDER = tempfile.TemporaryDirectory()
Path(FOLDER.name, "config.json").write_text(json.dumps(MODEL))
judged, differences = [], Counter()


class _Core:
    """What kvtiers asks of vLLM's engine core."""

    scheduler = None

    def get_weight_version(self):
        return "default"


_core = _Core()


class Judged:
    """kvtiers' manager over a primary of its own, for one scheduler of vLLM's."""

    def __init__(self, config):
        groups = {
            group.group_idx: GroupKeys(
                index,
                group.hashes_per_chunk,
                whole_prefix=group.sliding_window_size_in_chunks is None,
                hashes_per_block=max(1, group.tokens_per_block // config.tokens_per_hash),
            )
            for index, group in enumerate(config.kv_group_configs)
        }
        self.ranks = config.num_workers
        self.primary = CPUPrimaryTier(ROWS, ROW_BYTES, memoryview(bytearray(ROWS * ROW_BYTES)))
        sizes = [group.tokens_per_chunk for group in config.kv_group_configs]
        self.tiering = TieringManager("judged", self.primary, [], sizes, _Worker())
        self.digests = AdapterDigests()
        core = CoreLink(sees_requests=True)
        core.attach(_core)
        self.manager = KvtiersManager(
            self.tiering,
            RequestBook(groups, Weights("w", lambda: "v", lambda: 0), self.digests, lookup_wait=0.02),
            self.ranks,
            StepClock(),
            lambda: None,
            lambda: None,
            core,
            alone=False,
        )
        self.plans = {}
        """The rows of copies that have not ended, by whether they store and by vLLM's keys."""
        judged.append(self)

    def knows(self, context):
        """Return whether the request was announced; some of vLLM's tests call without."""
        return self.manager.requests.get(context.req_id) is not None

    def is_stored(self, key, context):
        return self.primary.lookup(self._own(key, context)).name == "HIT"

    def is_free(self, key, context):
        return self.primary.lookup(self._own(key, context)).name == "MISS"

    def make_true(self, key, wanted, context):
        """Store a chunk that is to be a hit, or forget one that is to be a miss and is not in use."""
        own = self._own(key, context)
        if wanted is LookupResult.HIT and self.is_free(key, context):
            self.primary.complete_store(self.primary.prepare_store([own], "judge").rows, success=True)
        elif wanted is LookupResult.MISS and self.is_stored(key, context):
            self.primary.forget([own])
        self.manager.on_schedule_end(NO_ONE)  # within a step of vLLM's tests what is stored changes

    def starts(self, keys, rows, *, stores):
        self.plans.setdefault((stores, frozenset(keys)), []).append(rows)

    def ends(self, keys, *, stores):
        if waiting := self.plans.get((stores, frozenset(keys))):
            self.manager.copies_ended(CopyReport(Counter({waiting.pop(0).plan_id: self.ranks})))

    def _own(self, key, context):
        request = self.manager.requests.get(context.req_id)
        keys = None if request is None else request.keys
        return key if keys is None else keys.of(key)


class _Worker:
    """What a tiering manager asks of the side that copies: nothing here copies bytes."""

    def ready(self):
        return True

    def dma_may_run(self):
        return False

    def tier_stats(self, _name):
        return {}

    def fingerprint(self):
        return "judged"


class Method:
    """A method of vLLM's mock that calls ``do``; all else (``side_effect``, ``call_args``) is the mock's own."""

    def __init__(self, mock, name, do):
        vars(self).update(_mock=mock, _name=name, _do=do)

    def __call__(self, *args, **more):
        return self._do(*args, **more)

    def __getattr__(self, name):
        return getattr(getattr(self._mock, self._name), name)

    def __setattr__(self, name, value):
        setattr(getattr(self._mock, self._name), name, value)


class Facade:
    """In the place of vLLM's mock: asks it, so that a test can count the calls, and then kvtiers."""

    def __init__(self, mock, side):
        vars(self).update(_mock=mock, _side=side)

    def __getattr__(self, name):
        do = getattr(type(self), f"do_{name}", None)
        return getattr(self._mock, name) if do is None else Method(self._mock, name, do.__get__(self))

    def __setattr__(self, name, value):
        setattr(self._mock, name, value)

    @property
    def __class__(self):
        return MagicMock

    def do_lookup(self, key, context):
        wanted = self._mock.lookup(key, context)
        if wanted not in {LookupResult.HIT, LookupResult.MISS} or not self._side.knows(context):
            return wanted
        self._side.make_true(key, wanted, context)
        got = self._side.manager.lookup(key, context)
        if got is not wanted:
            differences[f"lookup: vLLM's mock {wanted.name}, kvtiers {got.name}"] += 1
        return got

    def do_on_new_request(self, context):
        self._side.manager.on_new_request(context)
        return self._mock.on_new_request(context)

    def do_on_request_finished(self, context):
        self._mock.on_request_finished(context)
        self._side.manager.on_request_finished(context)

    def do_prepare_store(self, keys, context):
        keys, side = list(keys), self._side
        wanted = self._mock.prepare_store(keys, context)
        if not isinstance(wanted, PrepareStoreOutput) or not wanted.keys_to_store:
            return wanted
        chosen = list(wanted.keys_to_store)
        if not all(side.is_free(key, context) for key in chosen):  # the mock stores again what is stored
            return wanted
        got = side.manager.prepare_store(chosen, context)
        if got is None or list(got.keys_to_store) != chosen:
            taken = None if got is None else len(got.keys_to_store)
            differences[f"prepare_store: {len(chosen)} chunks wanted, {taken} taken"] += 1
        else:
            side.starts(chosen, got.store_spec, stores=True)
        return wanted

    def do_prepare_load(self, keys, context):
        keys, side = list(keys), self._side
        wanted = self._mock.prepare_load(keys, context)
        if side.knows(context) and all(side.is_stored(key, context) for key in keys):
            rows = side.manager.prepare_load(keys, context)
            if len(rows.chunk_ids) not in {len(keys), len(set(keys))}:
                differences[f"prepare_load: {len(keys)} chunks, {len(rows.chunk_ids)} rows"] += 1
            side.starts(keys, rows, stores=False)
        return wanted

    def do_complete_store(self, keys, context, *args, **more):
        self._side.ends(keys, stores=True)
        return self._mock.complete_store(keys, context, *args, **more)

    def do_complete_load(self, keys, context, *args, **more):
        self._side.ends(keys, stores=False)
        return self._mock.complete_load(keys, context, *args, **more)

    def do_on_schedule_end(self, context):
        self._mock.on_schedule_end(context)
        self._side.manager.on_schedule_end(context)

    def do_reset_cache(self):
        self._mock.reset_cache()
        self._side.manager.reset_cache()


def _local_model(**options):
    return _model_config(**{**options, "model": FOLDER.name, "skip_tokenizer_init": True})


def _init(self, *args, **more):
    _init_of_vllm(self, *args, **more)
    if isinstance(self.manager, MagicMock):
        self.manager = Facade(self.manager, Judged(self.config))


def _on_new_request(self, request):
    if type(self.manager) is Facade:
        self.manager._side.manager.requests.show(_shown(request))
    return _on_new_request_of_vllm(self, request)


def _shown(request):
    """Return a request whose fields are what they say: each attribute of a test's mock is another mock."""
    if isinstance(request, MagicMock):
        for name, value in PLAIN.items():
            if isinstance(getattr(request, name), MagicMock):
                setattr(request, name, value)
    return request


@contextmanager
def call(_item):
    """Fail a test in which kvtiers has answered otherwise, was misused, or has raised."""
    judged.clear()
    differences.clear()
    said = _Said(logging.ERROR)
    log = logging.getLogger("kvtiers")
    log.addHandler(said)
    try:
        yield
    finally:
        log.removeHandler(said)
        for side in judged:
            side.digests.close()
    for side in judged:
        if side.primary.misuse or side.tiering.stats()["engine"]["misuse"]:
            differences["misuse of the primary"] += 1
    differences.update(said.lines)
    if differences:
        pytest.fail("; ".join(f"{what} ({count} times)" for what, count in differences.items()), pytrace=False)


class _Said(logging.Handler):
    """What kvtiers logs of errors: a guard around each of its calls logs what it would have raised."""

    def __init__(self, level):
        super().__init__(level)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


_model_config = vllm_unit.ModelConfig
vllm_unit.ModelConfig = _local_model
_init_of_vllm = OffloadingConnectorScheduler.__init__
OffloadingConnectorScheduler.__init__ = functools.wraps(_init_of_vllm)(_init)  # kvtiers checks what vLLM's sets
_on_new_request_of_vllm = OffloadingConnectorScheduler.on_new_request
OffloadingConnectorScheduler.on_new_request = _on_new_request
assert vllm_utils  # its spec is the one whose manager is judged
