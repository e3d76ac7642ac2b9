"""vLLM's server as its users start it, its engine in a process of its own: what its /metrics say, and what we say."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from kvtiers.control import running, send_command
from kvtiers.plugins import load_tier
from kvtiers.status import ask_engine

from .conftest import AUTO, CHUNKS, PROMPTS, WHOLE
from .engines import BLOCK, PATIENCE, environment, family, shared_memory, transfer_config, wait_until
from .models import make_prompt
from .servers import SmallS3
from .ways import fs, tiers, whole_stack

KVTIERS = Path(sys.executable).with_name("kvtiers")
ENGINE_ID = f"kvtiers-test-{os.getpid()}-served"
READMES = sorted((Path(__file__).parents[4] / "plugins").glob("*_tier/README.md"))
DRAIN, HOSTS_END = 10, 8
"""Seconds of an engine's end, as our document for vLLM promises them."""
VLLMS_END = 15
"""Seconds of vLLM's own: it waits 5 for its worker, and then 6 for an engine whose tiers have ended; busy, longer."""
GOOD = ["memory", "fs", "redis", "s3"]
SWITCHED_CHUNKS = sum(len(prompt) // AUTO for prompt in PROMPTS)
"""Chunks of both prompts in ``switched``."""
GOOD_AND_BAD = dict.fromkeys(GOOD, 1) | {"bad": 0}
"""Of each tier of ``served``, whether it can be used."""


class Server:
    """vLLM's server on a port of its own. ``transfer``: its ``--kv-transfer-config``; None: it has no such argument."""

    def __init__(self, model, transfer, log, **env):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.model, self.log = model, log
        options = ["--model", model, "--host", "127.0.0.1", "--port", self.port, "--skip-tokenizer-init"]
        options += ["--dtype", "float32", "--seed", "0", "--enforce-eager", "--max-model-len", "2048"]
        options += ["--block-size", BLOCK, *(["--kv-transfer-config", transfer] if transfer is not None else [])]
        options += ["--shutdown-timeout", "60"]  # without, vLLM kills its engine as soon as it is to end
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, options)]
        with log.open("a") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(**env) | {"VLLM_SERVER_DEV_MODE": "1"},  # for reset_prefix_cache
                start_new_session=True,
            )
        until = time.monotonic() + PATIENCE
        while not self._is_up():
            assert self.process.poll() is None, f"the server has ended; see {log}"
            assert time.monotonic() < until, f"no server; see {log}"
            time.sleep(0.05)

    def _is_up(self):
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE) as answer:
            return answer.read().decode()

    def post(self, path, **body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def complete(self, prompt, tokens=8, **more):
        answer = self.post(
            "/v1/completions",
            model=str(self.model),
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
            **more,
        )
        return answer["choices"][0]["token_ids"]

    def figures(self, name):
        """Return a figure of /metrics by its label ``tier``."""
        line = rf'^{re.escape(name)}\{{(?:[^}}]*,)?tier="([^"]*)"[^}}]*\}} (\S+)$'
        lines = re.findall(line, self.get("/metrics"), re.MULTILINE)
        return {tier: float(value) for tier, value in lines}

    def until(self, condition):
        """Step the engine until a condition holds; return what it found."""
        until = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < until, "waited in vain"
            self.complete([1, 2, 3], tokens=2)
        return found

    def kill(self):
        shared = shared_memory(self.process.pid)
        for pid in family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        for path in shared | set(Path("/dev/shm").glob(f"vllm_offload_{ENGINE_ID}*")):
            path.unlink(missing_ok=True)


@pytest.fixture
def served_model(model, tmp_path):
    """A model of a name that no other engine on this machine has."""
    return shutil.copytree(model, tmp_path / f"served-{os.getpid()}")


@pytest.fixture(scope="module")
def small_s3():
    """An S3 server that takes no time to start."""
    server = SmallS3()
    yield server
    server.close()


@pytest.fixture(scope="module")
def served(model, tmp_path_factory, way, redis, small_s3):
    """A server with a tier of each type, and one that cannot be used; the last test with it ends it."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "file").write_text("in the folder's place")
    bad = fs(folder / "file", name="bad", required=False)
    here = ({"type": "memory", "capacity": "64MiB", "required": True}, fs(folder / "store"), bad)
    all_types = (*here, redis.tier(required=True), small_s3.tier(required=True))
    of_its_own = shutil.copytree(model, folder / f"served-{os.getpid()}-{way.__name__}")
    server = Server(of_its_own, json.dumps(transfer_config(ENGINE_ID, way(*all_types))), folder / "log")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def switched(model, tmp_path_factory):
    """A server that has nothing but the variable."""
    folder = tmp_path_factory.mktemp("switched")
    config = folder / "tiers.yaml"
    config.write_text(json.dumps(whole_stack(fs(folder / "store"), options={"tenants": {}})["kvtiers_config"]))
    server = Server(model, None, folder / "log", KVTIERS_CONFIG=str(config))
    yield server
    server.kill()


def status_of(model):
    done = subprocess.run([KVTIERS, "status", "--json"], capture_output=True, text=True, timeout=PATIENCE, check=True)
    (mine,) = [engine for engine in json.loads(done.stdout) if engine["model"] == model.name]
    return mine


def test_before_any_request_a_server_says_that_it_is_on_and_which_tier_cannot_be_used(served, way):
    expected = {"open": GOOD_AND_BAD, "breaker_state": {tier: 1 - state for tier, state in GOOD_AND_BAD.items()}}
    for name, each in expected.items():
        wait_until(lambda n=name, e=each: served.figures(f"kvtiers_tier_{n}") == e, f"no figure {name}")

    def lines(text):
        return [line for line in served.log.read_text().splitlines() if text in line]

    wait_until(lambda: lines("bad: out of use: ") and lines(" is on, "), "it says nothing")
    (reason,) = lines("bad: out of use: ")
    assert "kvtiers check" in reason
    wait_until(lambda: lines(" is on, "), "it does not say that it is on")
    (on,) = lines(" is on, ")
    assert "memory (memory) in use, fs (fs) in use, bad (fs) not usable, redis (redis) in use, s3 (s3) in use;" in on
    assert ("under vLLM's own tiering" if way is tiers else "as the whole stack") in on
    status = status_of(served.model)["tiers"]
    assert status["bad"]["trouble"]
    assert status["memory"]["open"]


def test_a_scrape_shows_which_tier_served_status_what_that_saved_and_the_end_leaves_nothing_unwritten(
    served, truth, way
):
    for prompt in PROMPTS:
        assert served.complete(prompt) == truth[tuple(prompt)]
    stored = "kvtiers_tier_stored_chunks_total"
    served.until(lambda: served.figures(stored) == dict.fromkeys(GOOD, CHUNKS))
    served.post("/reset_prefix_cache?reset_external=true")
    for prompt in PROMPTS:
        assert served.complete(prompt) == truth[tuple(prompt)]

    loaded = "kvtiers_tier_loaded_chunks_total"
    served.until(lambda: served.figures(loaded).get("memory") == CHUNKS)
    assert not any(served.figures(loaded).get(tier) for tier in GOOD[1:]), "the first tier had it all"
    if way is tiers:
        hits = served.figures("vllm:kv_offload_tiering_chunk_hits_total")
        assert hits.get("1:kvtiers-memory") == CHUNKS
        assert not hits.get("2:kvtiers-fs")
        assert served.figures("kvtiers_tier_loaded_tokens_total") == {"memory": sum(WHOLE)}
    else:
        hits = served.figures("kvtiers_tier_hits_total")
        assert hits.get("memory") == CHUNKS
        assert not hits.get("fs")
    assert served.figures("kvtiers_tier_open") == GOOD_AND_BAD
    assert served.figures("kvtiers_tier_breaker_state") == {tier: 1 - state for tier, state in GOOD_AND_BAD.items()}
    for seconds in ("load", "store"):
        assert served.figures(f"kvtiers_tier_{seconds}_seconds_total")["memory"] > 0
    asked, seconds = (served.figures(f"kvtiers_tier_lookup_{what}_total") for what in ("questions", "seconds"))
    assert asked.keys() == seconds.keys() == set(GOOD), "each was asked about what no tier had yet"
    assert all(0 < seconds[tier] < PATIENCE * asked[tier] for tier in asked)

    shown = set()
    for readme in READMES:
        tier = {"example_tier": "memory"}.get(readme.parent.name, readme.parent.name.removesuffix("_tier"))
        if tier not in GOOD:
            continue  # its figures: tests/unit/test_documented_figures.py
        shown.add(tier)
        (paragraph,) = re.findall(r"^Metrics: .*?(?=\n\n)", readme.read_text(), re.MULTILINE | re.DOTALL)
        figures, of_slab = (
            re.findall(r"`(?:kvtiers_tier)?(_[a-z_]+)`", part)
            for part in (*re.split("of the layout `slab` also", paragraph), "")[:2]
        )
        assert len(figures) + len(of_slab) == len(load_tier(tier).figures) > 0
        assert not any(served.figures(f"kvtiers_tier{figure}") for figure in of_slab), "this server has no slab"
        for figure in figures:
            served.until(lambda name=f"kvtiers_tier{figure}", tier=tier: tier in served.figures(name))
    assert shown == set(GOOD)

    status = status_of(served.model)
    assert status["fingerprint"]
    assert not status["orphaned"]
    memory, disk = status["tiers"]["memory"], status["tiers"]["fs"]
    assert (memory["tokens"], memory["unread_bytes"]) == (sum(WHOLE), 0)
    assert memory["saved_seconds"] is not None, "this engine has computed prompts, so how long that takes is measured"
    assert (disk["tokens"], disk["unread_bytes"]) == (0, disk["stored_bytes"])

    assert served.process.poll() is None
    served.complete(make_prompt(7, 6 * BLOCK + 1))
    served.process.terminate()
    served.process.wait(PATIENCE)
    wait_until(lambda: not family(served.process.pid), "processes outlive their server")
    written = (served.log.parent / "store").rglob("*00000000")
    assert len(list(written)) == CHUNKS + 6, "what was in flight was still written"
    assert not list(Path("/dev/shm").glob(f"*{ENGINE_ID}*"))


def test_a_server_that_has_nothing_but_the_variable_serves_with_its_tiers(switched, truth):
    for prompt in PROMPTS:
        assert switched.complete(prompt) == truth[tuple(prompt)]
    switched.until(lambda: switched.figures("kvtiers_tier_stored_chunks_total").get("fs") == SWITCHED_CHUNKS)


def test_a_server_that_has_served_nothing_yet_is_warmed_with_what_another_one_has_stored(
    switched, model, truth, tmp_path
):
    for prompt in PROMPTS:
        switched.complete(prompt)
    switched.until(lambda: switched.figures("kvtiers_tier_stored_chunks_total").get("fs") == SWITCHED_CHUNKS)
    config = switched.log.parent / "tiers.yaml"
    replica = Server(model, None, tmp_path / "log", KVTIERS_CONFIG=str(config))
    try:
        (pid,) = {int(name.split("-")[2]) for name in running()} & set(family(replica.process.pid))
        command = [KVTIERS, "warm", "--from", "fs", "--config", config, "--engine", str(pid), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (warmed,) = json.loads(done.stdout)
        assert (warmed["loaded"], warmed["ended"]) == (SWITCHED_CHUNKS, "done")
        for prompt in PROMPTS:
            assert replica.complete(prompt) == truth[tuple(prompt)]
        replica.until(lambda: replica.figures("kvtiers_tier_hits_total").get("fs", 0) > 0)
        assert replica.figures("kvtiers_tier_loaded_chunks_total")["fs"] == SWITCHED_CHUNKS, "its requests had to load"
    finally:
        replica.kill()


def test_an_idle_server_is_commanded_and_goes_on_with_the_right_tokens(switched, truth):
    engines = [ask_engine(name) for name in running() if int(name.split("-")[2]) in family(switched.process.pid)]
    (control,) = [engine["control"] for engine in engines]
    config = str(switched.log.parent / "tiers.yaml")

    def ctl(action, **arguments):
        return send_command(control, action, PATIENCE, **arguments)[1]

    def is_right():
        assert [switched.complete(prompt) for prompt in PROMPTS] == [truth[tuple(prompt)] for prompt in PROMPTS]

    hits = "kvtiers_tier_hits_total"
    before = switched.figures(hits).get("fs", 0)
    assert ctl("switch", tier="fs", to="off")["was"] == "on"
    switched.post("/reset_prefix_cache?reset_external=true")
    is_right()
    assert switched.figures(hits).get("fs", 0) == before
    assert ctl("drain")["failed_chunks"] == 0
    assert ctl("switch", tier="fs", to="on")["was"] == "off"
    assert ctl("limit", tier="fs", threads=2)["threads"] == 2
    assert ctl("reload", config=config)["applied"] == ["secondary.fs.threads"]
    assert ctl("detach", tier="fs") == {"tier": "fs"}
    switched.post("/reset_prefix_cache?reset_external=true")
    is_right()
    assert ctl("attach", tier="fs", config=config)["open"]
    switched.post("/reset_prefix_cache?reset_external=true")
    is_right()
    switched.until(lambda: switched.figures(hits).get("fs", 0) > before)


def test_weights_that_a_server_reloads_on_request_are_others(switched, truth):
    (first, _), stored, chunks = PROMPTS, "kvtiers_tier_stored_chunks_total", len(PROMPTS[0]) // AUTO
    assert switched.complete(first) == truth[tuple(first)]
    switched.until(
        lambda: switched.figures(stored).get("fs") in (chunks, SWITCHED_CHUNKS)
    )  # another test may have stored both
    loaded = "kvtiers_tier_loaded_chunks_total"
    before, loaded_before = switched.figures(stored)["fs"], switched.figures(loaded).get("fs", 0)
    assert switched.post("/collective_rpc", method="reload_weights") is not None
    switched.post("/reset_prefix_cache?reset_external=true")
    assert switched.complete(first) == truth[tuple(first)]
    switched.until(lambda: switched.figures(stored)["fs"] == before + chunks)
    assert switched.figures(loaded).get("fs", 0) == loaded_before, "their version was not named"


def test_the_field_of_a_request_over_http_keeps_its_rows_and_refuses_a_wrong_tenant(switched):
    def figure(name):
        (value,) = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", switched.get("/metrics"), re.MULTILINE) or ["0"]
        return float(value)

    prompt = make_prompt(8, 6 * AUTO + 1)
    switched.complete(prompt, kv_transfer_params={"kvtiers": {"tenant": "blue", "ttl": "1h"}})
    switched.until(lambda: figure("kvtiers_primary_kept_rows") == 6)
    switched.complete(prompt, kv_transfer_params={"kvtiers": {"tenant": "not a name"}})
    switched.until(lambda: figure("kvtiers_refused_tenants_total") == 1)


@pytest.fixture
def closed_port():
    """A port at which no process listens, and none will."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def printed(tmp_path, way, closed_port):
    """What ``kvtiers vllm-config`` prints for tiers none of which can be had."""
    (tmp_path / "store").write_text("in the folder's place")
    config = tmp_path / "tiers.yaml"
    config.write_text(f"""
version: 1
primary: {{capacity: 64MiB}}
secondary:
  - {{type: fs, path: {tmp_path}/store, capacity: 1GiB}}
  - {{type: redis, url: "redis://127.0.0.1:{closed_port}"}}
""")
    whole = ["--whole-stack"] if way is whole_stack else []
    command = [KVTIERS, "vllm-config", config, *whole]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    option, transfer = shlex.split(done.stdout)
    assert option == "--kv-transfer-config"
    if way is whole_stack:
        return transfer
    # vLLM's own spec is for GPUs; the rest is as it is printed.
    known = json.loads(transfer) | {"engine_id": ENGINE_ID}
    known["kv_connector_extra_config"] |= {"spec_name": "CpuTieringSpec", "spec_module_path": "cpu_spec"}
    return json.dumps(known)


def test_a_server_with_the_config_that_we_print_is_healthy_and_right_with_every_tier_down(
    served_model, truth, printed, tmp_path
):
    server = Server(served_model, printed, tmp_path / "log")
    try:
        for prompt in PROMPTS * 2:
            assert server.complete(prompt) == truth[tuple(prompt)]
        server.until(lambda: server.figures("kvtiers_tier_open") == {"fs": 0, "redis": 0})
        status = status_of(served_model)["tiers"]
        assert not status["fs"]["open"]
        assert not status["redis"]["open"]
        server.get("/health")  # raises for anything but 200
    finally:
        server.kill()


def test_a_primary_larger_than_the_machine_ends_the_start_before_a_model_is_loaded(served_model, tmp_path, way):
    extra = whole_stack(options={"primary": {"capacity": "1PiB"}})
    if way is tiers:
        extra = tiers(fs(tmp_path / "store"), cpu_bytes_to_use=1 << 50)
    with pytest.raises(AssertionError, match="the server has ended"):
        Server(served_model, json.dumps(transfer_config(ENGINE_ID, extra)), tmp_path / "log")
    log = (tmp_path / "log").read_text()
    option = "cpu_bytes_to_use" if way is tiers else "primary.capacity"
    assert f"kvtiers: {option}: 1PiB of memory are wanted, but the machine has" in log
    assert "EngineCore" not in log, "no engine has been begun"


def test_an_end_with_a_slow_tier_is_bounded_and_says_what_was_dropped(served_model, way, tmp_path):
    slow = fs(tmp_path / "store", rate_limit={"bytes_per_second": 16 << 10}, deadline="300s")
    server = Server(served_model, json.dumps(transfer_config(ENGINE_ID, way(slow))), tmp_path / "log")
    try:
        for prompt in PROMPTS:
            server.complete(prompt)
        wait_until(lambda: server.figures("kvtiers_tier_storing_chunks").get("fs", 0) > 0, "nothing is to be stored")
        server.process.terminate()
        began = time.monotonic()
        log = tmp_path / "log"
        wait_until(lambda: "EngineCore: request processing complete" in log.read_text(), "stores are waited for")
        assert time.monotonic() - began < DRAIN + HOSTS_END, "all of it would take minutes at this rate"
        server.process.wait(PATIENCE)
        assert time.monotonic() - began < DRAIN + HOSTS_END + VLLMS_END
        assert "shutdown within 10s dropped" in (tmp_path / "log").read_text()
    finally:
        server.kill()
