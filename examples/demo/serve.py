"""An engine's process: serves what comes in over stdin, a line of JSON each, and answers in the same way.

Between two questions it steps for as long as there is anything to step for, as a server's engine does.
"""

import json
import select
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from demo.engine import Engine, Request
from demo.setting import TOKENS_PER_CHUNK, EngineOptions
from demo.tiered import TieredEngine
from kvtiers import RequestContext


def main() -> None:
    """Serve until the other end closes the pipe."""
    options = EngineOptions.of_data(json.loads(sys.stdin.buffer.readline()))
    if not options.check_seals:
        _believe_everything()
    engine: Engine
    if options.config is None:
        engine = Engine(options.size, options.num_blocks, options.piece)
    else:
        engine = TieredEngine(options.config, options.size, options.num_blocks, options.piece)
    _say({"engine_id": engine.manager.engine_id if isinstance(engine, TieredEngine) else ""})
    for number, order in enumerate(_orders(engine)):
        if "prompt" in order:
            context = RequestContext(str(number), order["params"])
            _say(_serve(engine, Request(context, order["prompt"], order["new_tokens"])))
        elif "settle" in order:
            until = time.monotonic() + order["settle"]
            while engine.busy() and time.monotonic() < until:
                engine.step()
            _say({"settled": not engine.busy()})
        else:
            _say(_stats(engine))
    engine.close()


def _believe_everything() -> None:
    """Switch the check of the seals off: any bytes are taken for those that were stored.

    kvtiers has no option for that, and needs none: this replaces the check inside this one process, and so for tiers
    with ``io: thread`` alone. It is how act 3 shows that the check is what keeps damaged KV away.
    """
    from kvtiers.layout.seal import PlainSeal, SealVerdict

    setattr(PlainSeal, "check", lambda *_: SealVerdict.OK)  # noqa: B010 -- mypy refuses the assignment


def _orders(engine: Engine) -> Iterator[dict[str, Any]]:
    while True:
        while not select.select([sys.stdin], [], [], 0.0 if engine.busy() else None)[0]:
            engine.step()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        yield json.loads(line)


def _serve(engine: Engine, request: Request) -> dict[str, Any]:
    before = _stats(engine)
    engine.steps.clear()
    arrived = time.perf_counter()
    engine.submit(request)
    while not request.done:
        engine.step()
    assert request.first_token is not None
    computed = sum(tokens for step in engine.steps for start, tokens in step.work if start < request.prompt_tokens)
    return {
        "tokens": request.answer,
        "first_token": request.first_token - arrived,
        "saved": request.prompt_tokens - computed,
        "sources": _sources(request, before, _stats(engine)),
        "steps": engine.steps,
    }


def _stats(engine: Engine) -> dict[str, Any]:
    return engine.manager.stats() if isinstance(engine, TieredEngine) else {}


def _sources(request: Request, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """Say where the tokens came from: a tier counts a chunk that a request was the first to read."""
    sources, left = {"own cache": request.cached}, request.loaded
    for name, figures in after.get("tiers", {}).items():
        # The last chunk may hold tokens that are computed nevertheless.
        sources[name] = min(left, (figures["hits"] - before["tiers"][name]["hits"]) * TOKENS_PER_CHUNK)
        left -= sources[name]
    sources["primary"] = left
    return {name: tokens for name, tokens in sorted(sources.items(), key=lambda of: -of[1]) if tokens}


def _say(what: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
