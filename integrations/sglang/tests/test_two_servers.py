"""Two servers in two processes, which share what either has stored: in a directory, and in Redis."""

import json
import os
import subprocess
import sys
from pathlib import Path

ELSEWHERE = """
import hashlib, json, sys
from types import SimpleNamespace
from kvtiers_sglang import backend
arguments = dict(model_path="test/model", revision="0" * 40, load_format="auto", kv_cache_dtype="auto")
backend.server_arguments = lambda: SimpleNamespace(**arguments)
from tests.parts import Server, mha_pool
for what, config, layout in json.loads(sys.argv[1]):
    server = Server(mha_pool(layout), {"config": config, "bounce_bytes": "4MiB", "deadline": "60s"})
    if what == "store":
        keys, content = server.store(pages=3, seed=5)
        found = [True] * 3
    else:
        found, content = server.load(server.keys(3, seed=5))
    server.close()
    print("found", json.dumps([found, hashlib.sha256(content).hexdigest()]))
"""


def run(*servers):
    """Run servers one after the other in a process; return what each has found, and a digest of its pages."""
    folder = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ELSEWHERE, json.dumps(servers)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        timeout=240,
        check=True,
    )
    lines = [line.partition(b" ")[2] for line in done.stdout.splitlines() if line.startswith(b"found ")]
    return [json.loads(line) for line in lines]


def test_a_server_finds_what_another_process_has_stored_and_one_of_another_layout_does_not(config, redis_url):
    configs = [config, {**config, "secondary": [{"type": "redis", "url": redis_url}]}]
    stored = run(*[("store", one, "page_first") for one in configs])
    loaded = run(*[("load", one, layout) for one in configs for layout in ("page_first", "page_head")])
    assert [found for found, _ in loaded] == [[True] * 3, [False] * 3] * 2
    assert loaded[::2] == stored
    assert loaded[1][1] != stored[0][1]
