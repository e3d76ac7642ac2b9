"""Requests that vLLM preempts when it has too few blocks: they are looked up again, and decided anew."""

import os
import signal

from .engines import BLOCK
from .models import make_prompt
from .ways import fs, whole_stack

PROMPTS = [make_prompt(seed, 10 * BLOCK + 5) for seed in (21, 22)]
TOKENS = 200
FEW = {"num_gpu_blocks_override": 28, "max_model_len": 20 * BLOCK, "enable_prefix_caching": False}
"""Blocks for the two prompts, but not for both answers."""
WAITS = {"lookup_wait": "2s", "load_wait": "60s"}


def test_a_preempted_request_is_loaded_though_it_had_waited_too_long_before(start, model, tmp_path, way):
    config = way(fs(tmp_path / "store", processes=1), waits=WAITS)
    engine = start(model, config, **FEW)
    right, cached = engine.generate(*PROMPTS, tokens=TOKENS)
    assert cached == [0, 0]
    engine.settle()
    engine.shutdown()
    engine = start(model, config, **FEW)  # which does not know what the tier has
    (host,) = engine.hosts()
    os.kill(host, signal.SIGSTOP)
    answer = engine.do("generate_while_stopped", host=host, prompts=PROMPTS, max_tokens=TOKENS)
    assert answer == {"tokens": right, "cached": [0, 0]}, "no answer came in time"
    assert engine.metrics().get("kvtiers_tier_loaded_chunks{fs}") == 10, "those of the one that was preempted"
    engine.shutdown()


def test_a_request_that_a_reset_preempts_is_loaded_in_the_next_step(start, model, tmp_path):
    engine = start(model, whole_stack(fs(tmp_path / "store")), max_model_len=20 * BLOCK)
    right, _ = engine.generate(*PROMPTS, tokens=8)
    engine.settle()
    assert engine.do("generate_with_preemption", prompts=PROMPTS, max_tokens=8)["tokens"] == right
    assert engine.metrics()["vllm:num_preemptions"] == 2
    engine.shutdown()
