"""Nothing of kvtiers' whole stack raises into vLLM's step, whichever of its calls has a bug."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvtiers.types import TransferResult
from kvtiers_vllm.stack.adapter_digests import AdapterDigests
from kvtiers_vllm.stack.plans import CopyReport

from . import fake_vllm


class Broken:
    """Something of ours, every part of which has a bug."""

    def __getattr__(self, name):
        raise ZeroDivisionError(name)


class Gpu:
    """A rank's worker; ``copies``: the results to come."""

    def __init__(self):
        self.copies = []

    def submit_store(self, job_id, _blocks, _rows):
        self.copies.append(TransferResult(job_id, True, 64, 0.5))

    def submit_load(self, job_id, _rows, _blocks, _expedited):
        self.copies.append(TransferResult(job_id, True, 64, 0.5))

    def get_finished(self):
        copies, self.copies = self.copies, []
        return copies


# -- the connector


@pytest.fixture
def connector_module(monkeypatch):
    return fake_vllm.load(monkeypatch, "stack.connector", "0.32.0")


def engine_config(**extra):
    """Return vLLM's config of an engine with kvtiers' connector."""
    transfer = fake_vllm.KVTransferConfig("KvtiersConnector", kv_connector_extra_config=extra)
    return SimpleNamespace(kv_transfer_config=transfer)


@pytest.fixture
def connector(connector_module):
    """A connector whose manager and worker have a bug in every call."""
    connector = connector_module.KvtiersConnector(engine_config(), "role", "kv_cache_config")
    connector.connector_scheduler = SimpleNamespace(manager=Broken())
    connector.connector_worker = SimpleNamespace(worker=Broken())
    return connector


@pytest.mark.parametrize(
    ("call", "arguments", "answer"),
    [
        ("on_new_request", [SimpleNamespace(request_id="a")], None),
        ("get_num_new_matched_tokens", [SimpleNamespace(request_id="a"), 0], (16, True)),
        ("get_num_new_matched_tokens", [SimpleNamespace(request_id="a"), 16], (16, True)),
        ("build_connector_meta", [SimpleNamespace(num_scheduled_tokens={})], fake_vllm.OffloadingConnectorMetadata()),
        ("get_transfer_results", [set()], fake_vllm.Results()),
        ("get_block_ids_with_load_errors", [], set()),
        ("bind_connector_metadata", ["metadata"], None),
    ],
)
def test_a_call_of_the_connectors_answers_what_vllm_answers(connector, call, arguments, answer, caplog):
    assert getattr(connector, call)(*arguments) == answer
    assert connector.calls == [call]
    assert "a bug of kvtiers" in caplog.text


@pytest.mark.parametrize(("tokens", "computes"), [(16, True), (0, False)], ids=["computes", "only moves KV"])
def test_a_rank_notes_a_step_and_begins_its_loads_before_vllm_launches_its_model(
    connector, worker_module, tokens, computes, caplog
):
    """vLLM binds the step's metadata first; its call to start loads comes after the model's launches."""
    gpu = Gpu()
    gpu.note_step = lambda *, computes: connector.calls.append(("note_step", computes))
    gpu.submit_load = lambda job_id, *_: connector.calls.append(("submit_load", job_id))
    gpu.wait = lambda _jobs: None
    connector.connector_worker = SimpleNamespace(worker=worker_module.KvtiersWorker(gpu, 1))
    step = SimpleNamespace(total_num_scheduled_tokens=tokens, num_scheduled_tokens={})
    metadata = connector.build_connector_meta(step)
    assert (metadata.load_jobs, metadata.store_jobs) == ("loads", "stores"), "vLLM's own orders, unchanged"
    metadata.load_jobs = {7: SimpleNamespace(src_spec=rows(worker_module), dst_spec=blocks())}
    connector.calls.clear()
    caplog.clear()
    connector.bind_connector_metadata(metadata)
    assert connector.calls == [("note_step", computes), ("submit_load", 7), "bind_connector_metadata"]
    assert connector.connector_worker.worker.submit_load(7, rows(worker_module), blocks())
    assert connector.calls[-1] == "bind_connector_metadata", "vLLM's own call begins nothing twice"
    assert "a bug of kvtiers" not in caplog.text


def test_results_of_copies_that_the_manager_cannot_take_are_passed_to_vllm(connector, connector_module, caplog):
    report = connector_module.WorkerReport({1}, "stats")
    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))
    assert connector.calls == ["update_connector_output"]
    assert "a bug of kvtiers" in caplog.text


def test_a_worker_that_cannot_report_copies_reports_what_vllm_has_to_report(connector, caplog):
    report = connector.build_connector_worker_meta()
    assert (report.completed_jobs, report.transfer_stats, report.copies) == ({1}, "stats", CopyReport())
    assert "a bug of kvtiers" in caplog.text


def test_what_vllms_own_call_raises_is_raised(connector, monkeypatch):
    monkeypatch.setattr(fake_vllm.OffloadingConnector, "on_new_request", Broken.__getattr__)
    with pytest.raises(ZeroDivisionError):
        connector.on_new_request(SimpleNamespace(request_id="a"))


# -- the worker


@pytest.fixture
def worker_module(monkeypatch):
    return fake_vllm.load(monkeypatch, "stack.worker", "0.32.0")


def blocks(**changes):
    return SimpleNamespace(**({"block_ids": [1], "group_sizes": [1], "block_indices": [0]} | changes))


def rows(worker_module, plan_id=3):
    return worker_module.PlannedRows(plan_id, "a", np.array([0], np.int32))


def ended(worker):
    return [(result.job_id, result.success) for result in worker.get_finished()]


@pytest.mark.parametrize("call", ["submit_store", "submit_load"])
def test_a_job_whose_blocks_cannot_be_read_is_refused(worker_module, call, caplog):
    worker, of_rows = worker_module.KvtiersWorker(Gpu(), 1), rows(worker_module)
    bad = blocks(group_sizes=[1, 1], block_ids=object())
    arguments = (bad, of_rows) if call == "submit_store" else (of_rows, bad)
    assert getattr(worker, call)(7, *arguments)
    assert ended(worker) == [(7, True)], "vLLM asserts that copies succeed"
    assert ended(worker) == []
    report = worker.take_report()
    assert (dict(report.ended), report.failed) == ({3: 1}, {3})
    assert worker.take_failed_loads() == (set() if call == "submit_store" else {"a"})
    assert "a bug of kvtiers" in caplog.text


@pytest.mark.parametrize("call", ["submit_store", "submit_load"])
def test_a_job_whose_rows_are_none_is_reported_all_the_same(worker_module, call, caplog):
    worker = worker_module.KvtiersWorker(Gpu(), 1)
    arguments = (blocks(), None) if call == "submit_store" else (None, blocks())
    assert getattr(worker, call)(7, *arguments)
    assert ended(worker) == [(7, True)]
    assert "a bug of kvtiers" in caplog.text


def test_a_worker_that_is_broken_refuses_what_it_is_given(worker_module):
    worker = worker_module.KvtiersWorker(Broken(), 1)
    assert worker.submit_store(7, blocks(), rows(worker_module))
    assert worker.submit_load(8, rows(worker_module), blocks())
    worker.wait({7})
    assert ended(worker) == [(7, True), (8, True)]
    assert worker.take_failed_loads() == {"a"}
    worker.shutdown()


def test_a_store_that_vllm_could_not_wait_for_has_failed(worker_module, caplog):
    """It may read what the next request writes into its blocks."""
    worker = worker_module.KvtiersWorker(Gpu(), 1)
    assert worker.submit_store(7, blocks(), rows(worker_module, plan_id=3))
    assert worker.submit_store(8, blocks(), rows(worker_module, plan_id=4))
    worker.wait({7, 9})
    assert ended(worker) == [(7, True), (8, True)]
    report = worker.take_report()
    assert (dict(report.ended), report.failed) == ({3: 1, 4: 1}, {3})
    assert "a bug of kvtiers" in caplog.text
    assert worker.submit_store(9, blocks(), rows(worker_module, plan_id=5))
    assert ended(worker) == [(9, True)]
    assert worker.take_report().failed == set()


class Waiting(Gpu):
    """Every copy has ended by the time that it is asked about."""

    def wait(self, _job_ids):
        return


def test_a_worker_that_is_not_broken_reports_what_was_copied(worker_module, caplog):
    worker = worker_module.KvtiersWorker(Waiting(), 1)
    assert worker.submit_store(7, blocks(), rows(worker_module))
    assert worker.submit_load(8, rows(worker_module), blocks())
    assert ended(worker) == [(7, True), (8, True)]
    report = worker.take_report()
    assert (dict(report.ended), report.failed) == ({3: 2}, set())
    assert not caplog.records


# -- adapters


def test_an_adapter_is_loaded_also_where_no_thread_can_look_at_its_files(monkeypatch, caplog):
    def no_thread(*_arguments, **_options):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("kvtiers_vllm.stack.adapter_digests.threading.Thread", no_thread)
    AdapterDigests().digest_before_loading(SimpleNamespace(lora_int_id=1, load_inplace=True))
    assert "a bug of kvtiers" in caplog.text
