"""Two servers in two processes, which share what either has stored: in a directory, and in Redis."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from .parts import Server, mha_pool

OPTIONS = {"bounce_bytes": "4MiB", "deadline": "60s"}
ELSEWHERE = """
import hashlib, json, sys
from tests import without_torchvision
from sglang.srt.plugins import load_plugins
from tests.parts import Server, mha_pool, published
load_plugins()
published().install()
for what, seed, layout, options in json.loads(sys.argv[1]):
    server = Server(mha_pool(layout), options)
    if what == "store":
        content = server.store(pages=3, seed=seed)[1]
        found = [True] * 3
    else:
        found, content = server.load(server.keys(3, seed=seed))
    server.close()
    print("found", json.dumps([found, hashlib.sha256(content).hexdigest()]))
"""


def run_elsewhere(*servers):
    """Run servers one after the other in another process; return what each has found, and a digest of its pages."""
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


def test_each_server_finds_what_another_process_has_stored_and_one_of_another_layout_does_not(
    publish, config, redis_server
):
    configs = [config, {**config, "secondary": [{"type": "redis", "url": redis_server.url}]}]
    todo, stored = [], []
    for options in ({"config": one, **OPTIONS} for one in configs):
        server = Server(mha_pool(), options)
        stored.append(server.store(pages=3, seed=5)[1])
        server.close()
        todo += [("load", 5, layout, options) for layout in ("page_first", "page_head")]
        todo.append(("store", 6, "page_first", options))
    found = run_elsewhere(*todo)
    digests = [hashlib.sha256(content).hexdigest() for content in stored]
    assert [pages for pages, _ in found] == [[True] * 3, [False] * 3, [True] * 3] * 2
    assert [digest for _, digest in found[::3]] == digests
    assert found[1][1] != digests[0]
    for options, (_, digest) in zip(({"config": one, **OPTIONS} for one in configs), found[2::3], strict=True):
        server = Server(mha_pool(), options)
        there, content = server.load(server.keys(3, seed=6))
        server.close()
        assert (there, hashlib.sha256(content).hexdigest()) == ([True] * 3, digest)
