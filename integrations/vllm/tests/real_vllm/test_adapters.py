"""What belongs to a request, over one Redis: adapters of one name, reloaded adapters, salts called like adapters."""

from .conftest import PROMPTS, WHOLE
from .engines import BLOCK
from .models import make_adapter, make_prompt
from .ways import whole_stack

FIRST, MORE = PROMPTS[0], make_prompt(9, 2 * BLOCK)
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}


def test_adapters_and_salts_share_only_with_themselves(start, model, tmp_path, redis):
    config = whole_stack(redis.tier(required=True))
    path = make_adapter(tmp_path / "adapter", seed=1)
    mine = {"name": "mine", "number": 1, "path": str(path)}
    first = start(model, config, **LORA)
    plain, _ = first.generate(FIRST)
    adapted, cached = first.generate(FIRST, adapter=mine)
    assert cached == [0], "an adapter has nothing of the model alone"
    assert adapted != plain
    assert first.generate(FIRST, salt="mine") == (plain, [0]), "a salt is not the adapter of that name"
    first.forget()
    whole = [WHOLE[0]]
    for answer, more in ((adapted, {"adapter": mine}), (plain, {"salt": "mine"}), (plain, {})):
        assert first.generate(FIRST, **more) == (answer, whole), f"each finds its own: {more}"

    make_adapter(path, seed=2)
    _, cached = first.generate(FIRST + MORE, adapter=mine | {"reload": True})
    assert cached == whole, "vLLM's own prefix cache does not look at files"
    first.forget()
    reloaded, cached = first.generate(FIRST, adapter=mine)
    assert cached == [0], "an adapter that was reloaded has nothing of the one before"
    assert reloaded not in (adapted, plain)
    first.forget()
    assert first.generate(FIRST + MORE, adapter=mine)[1] == whole, "of what both of them computed nothing was kept"
    first.forget()
    assert first.generate(FIRST, adapter=mine) == (reloaded, whole)
    first.shutdown()

    make_adapter(path, seed=3)
    second = start(model, config, **LORA)
    other, cached = second.generate(FIRST, adapter=mine)
    assert cached == [0], "of two adapters of one name and place each has its own"
    assert other not in (reloaded, adapted, plain)
    assert second.generate(FIRST, salt="mine") == (plain, whole)
    second.do("ignore_adapters")
    second.generate(FIRST, adapter=mine)
    second.forget()
    make_adapter(path, seed=2)
    wrong, cached = second.generate(FIRST, adapter=mine | {"reload": True})
    assert cached == whole, "without the digest of their files they do share"
    assert wrong != reloaded
    second.shutdown()
