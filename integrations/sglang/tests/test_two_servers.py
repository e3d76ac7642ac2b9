"""Two servers in two processes, which share what either has stored: in a directory, and in Redis."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ELSEWHERE = """
import hashlib, json, sys
from types import SimpleNamespace
from kvtiers_sglang import backend
what, config, layout = json.loads(sys.argv[1])
arguments = dict(model_path="test/model", revision="0" * 40, load_format="auto", kv_cache_dtype="auto")
backend.server_arguments = lambda: SimpleNamespace(**arguments)
from integrations_sglang_tests.parts import Server, mha_pool
server = Server(mha_pool(layout), {"config": config, "bounce_bytes": "4MiB"})
if what == "store":
    keys, content = server.store(pages=3, seed=5)
    found = [True] * 3
else:
    found, content = server.load(server.keys(3, seed=5))
server.close()
print(json.dumps([found, hashlib.sha256(content).hexdigest()]))
"""


def run(what, config, layout="page_first"):
    """Start a server in a process of its own; return what it has found, and a digest of its pages."""
    folder = Path(__file__).parent
    code = ELSEWHERE.replace("integrations_sglang_tests", folder.name)
    done = subprocess.run(  # noqa: S603 -- our own code
        [sys.executable, "-W", "ignore", "-c", code, json.dumps([what, config, layout])],
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": str(folder.parent)},
        stdout=subprocess.PIPE,
        timeout=200,
        check=True,
    )
    found, digest = json.loads(done.stdout.splitlines()[-1])
    return found, digest


@pytest.mark.parametrize("kind", ["fs", "redis"])
def test_a_server_finds_what_another_process_has_stored_and_one_of_another_layout_does_not(config, kind, redis_url):
    if kind == "redis":
        config["secondary"] = [{"type": "redis", "url": redis_url}]
    stored, content = run("store", config)
    assert run("load", config) == (stored, content)
    found, other = run("load", config, "page_head")
    assert found == [False] * 3
    assert other != content
