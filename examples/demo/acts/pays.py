"""Act 1. It pays: the same questions on long documents, to an engine without kvtiers and to one with it."""

import contextlib
from collections.abc import Iterator
from statistics import median

from demo.acts import expect
from demo.process import EngineProcess
from demo.redis import local_redis
from demo.setting import Setting
from demo.table import Table

__all__ = ["it_pays"]

# Four documents: the primary has room for three, and the memory tier for one and a half. So they come back from
# everywhere. None comes twice in a row: the engine's own memory has room for one, with kvtiers and without.
_FIRST = (1, 2, 3, 4)
_AGAIN = (3, 1, 2, 4)
_FROM_REDIS = 3


def it_pays(setting: Setting) -> str:
    """Ask both engines in turns; compare times to first token, and the tokens."""
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(local_redis(setting.folder))
        memory = {"type": "memory", "capacity": setting.capacity(1.5), "required": True}
        config = setting.config(memory, setting.fs(required=True), *redis, documents=3.1)
        plain = stack.enter_context(EngineProcess(setting.folder, "without", setting.engine()))
        tiered = stack.enter_context(EngineProcess(setting.folder, "with", setting.engine(config)))
        table = Table(
            ("document", 8), ("asked", -5), ("without kvtiers", 15), ("with", 8), ("faster", 7), ("computed", 14),
            ("the rest came from", -30), ("tokens", -9),
        )  # fmt: skip
        gains, sources = [], set[str]()
        for number, (document, again, tiers) in enumerate(_questions(bool(redis))):
            prompt = setting.prompt(document, number)
            one = plain.ask(prompt, setting.new_tokens)
            other = tiered.ask(prompt, setting.new_tokens, **tiers)
            expect(tiered.settle(), "the tiers were still busy a minute after a question")
            gain, same = one.first_token / other.first_token, one.tokens == other.tokens
            computed = f"{len(prompt) - other.saved:,} of {len(prompt):,}"
            table.row(
                str(document), "again" if again else "first", f"{one.first_token:.3f} s", f"{other.first_token:.3f} s",
                f"{gain:.1f} x", computed, other.origin, "the same" if same else "DIFFERENT", good=same,
            )  # fmt: skip
            expect(same, f"document {document}: the engine with kvtiers gave other tokens")
            if again:
                whole = other.saved >= setting.document_tokens
                expect(whole, f"document {document} was asked again, and {computed} tokens had to be computed")
                gains.append(gain)
                sources.update(other.sources)
    # Which tier it is may differ: a busy machine drops writes to one of them, as it should.
    expect(bool(sources - {"own cache", "primary"}), "no document came from a tier")
    gain = median(gains)
    expect(
        gain >= setting.least_gain,
        f"a known document is answered {gain:.1f} times as fast, expected {setting.least_gain:g}",
    )
    return f"the first token to a known document comes {gain:.1f} times as fast, and all tokens are the same"


def _questions(redis: bool) -> Iterator[tuple[int, bool, dict[str, object]]]:
    """Yield the document, whether it was asked before, and what the request says about tiers."""
    yield from ((document, False, {}) for document in _FIRST)
    yield from ((document, True, {}) for document in _AGAIN)
    if redis:
        yield _FROM_REDIS, True, {"kv_load_tiers": ["redis"]}
