"""The demo's model is a transformer: its tokens depend on all KV before them, and not on how that came to be there."""

import numpy as np
import pytest
from demo.setting import Setting
from demo.transformer import Size, Transformer

SIZE = Size(layers=3, width=64, heads=4, hidden=128, vocabulary=256)
PER_BLOCK, BLOCKS = 16, 20
CHANCE = np.random.default_rng(7)
TOKENS = CHANCE.integers(0, SIZE.vocabulary, 200).tolist()
ORDER = CHANCE.permutation(BLOCKS).tolist()


@pytest.fixture(scope="module")
def model():
    return Transformer(SIZE)


def empty():
    return [np.zeros((BLOCKS, 2, PER_BLOCK, SIZE.head_width), np.float32) for _ in range(SIZE.layers)]


def computed(model, kv, piece, start=0, tokens=TOKENS, blocks=ORDER):
    for at in range(start, len(tokens), piece):
        logits = model.forward(tokens[at : at + piece], at, kv, blocks)
    return logits


def plain_attention(model, tokens):
    """The same model written out token by token, with no cache and no blocks."""
    size, head = SIZE, SIZE.head_width
    turns = 10_000.0 ** (-np.arange(0, head, 2) / head)

    def norm(x):
        return x / np.sqrt(np.mean(x * x) + 1e-6)

    def rotated(x, place):
        cos, sin = np.cos(place * turns), np.sin(place * turns)
        even, odd = x[0::2], x[1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=1).ravel()

    states = [model.embedding[token].astype(np.float64) for token in tokens]
    for qkv, out, up, down in model.layers:
        mixed = [norm(x) @ qkv for x in states]
        keys = [rotated(row[size.width : size.width + head], place) for place, row in enumerate(mixed)]
        values = [row[size.width + head :] for row in mixed]
        after = []
        for place, (x, row) in enumerate(zip(states, mixed, strict=True)):
            parts = []
            for number in range(size.heads):
                query = rotated(row[number * head : (number + 1) * head], place)
                scores = np.array([query @ key for key in keys[: place + 1]]) / head**0.5
                weights = np.exp(scores - scores.max())
                parts.append(weights / weights.sum() @ np.array(values[: place + 1]))
            with_attention = x + np.concatenate(parts) @ out
            after.append(with_attention + np.maximum(norm(with_attention) @ up, 0) @ down)
        states = after
    return norm(states[-1]) @ model.head


def test_it_computes_what_a_transformer_computes(model):
    kv = empty()
    logits = computed(model, kv, piece=40, tokens=TOKENS[:75])
    assert np.allclose(logits, plain_attention(model, TOKENS[:75]), atol=1e-4)


@pytest.mark.parametrize("piece", [1, 16, 33, 64])
def test_pieces_give_what_the_whole_gives(model, piece):
    whole = computed(model, empty(), len(TOKENS))
    assert np.allclose(computed(model, empty(), piece), whole, atol=1e-4)


def test_equal_pieces_give_equal_bits_in_whichever_blocks_the_kv_lies(model):
    """So a loaded prefix, of whole pieces, changes no bit of what is computed behind it."""
    one, other = empty(), empty()
    whole = computed(model, one, 64)
    elsewhere = ORDER[::-1]
    for of_one, of_other in zip(one, other, strict=True):
        of_other[elsewhere[:8]] = of_one[ORDER[:8]]
    rest = computed(model, other, 64, start=128, blocks=elsewhere)
    assert whole.tobytes() == rest.tobytes()


@pytest.mark.parametrize("token", [0, 100, 190])
def test_a_token_depends_on_all_tokens_before_it(model, token):
    others = [*TOKENS]
    others[token] = (others[token] + 1) % SIZE.vocabulary
    difference = np.abs(computed(model, empty(), 64) - computed(model, empty(), 64, tokens=others)).max()
    assert difference > 1e-3


def test_no_token_depends_on_those_behind_it(model):
    one, other = empty(), empty()
    computed(model, one, 100, tokens=TOKENS[:100])
    computed(model, other, 200)
    for of_one, of_other in zip(one, other, strict=True):
        assert np.allclose(of_one[ORDER[:6]], of_other[ORDER[:6]], atol=1e-4)


@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("layer", range(SIZE.layers))
def test_wrong_kv_makes_other_logits(model, layer, part):
    kv = empty()
    whole = computed(model, kv, 64)
    kv[layer][ORDER[3], part] += 1
    damaged = computed(model, kv, 64, start=192)
    assert np.abs(whole - damaged).max() > 1e-3


def test_other_weights_have_another_identity(model):
    assert Transformer(SIZE).digest() == model.digest()
    assert Transformer(SIZE, seed=1).digest() != model.digest()


def test_greedy_tokens_are_not_a_close_call(setting):
    """The acts compare tokens: rounding, as between pieces of other lengths, must not decide between two of them."""
    model = Transformer(setting.size)
    for document, question in [(1, 0), (2, 1), (3, 2), (4, 3)]:
        tokens = setting.prompt(document, question)
        blocks = list(range(-(-(len(tokens) + setting.new_tokens) // PER_BLOCK)))
        outcomes = []
        for piece in (setting.piece, 48):
            kv = [np.zeros((len(blocks), 2, PER_BLOCK, setting.size.head_width), np.float32) for _ in model.layers]
            outcomes.append(computed(model, kv, piece, tokens=tokens, blocks=blocks))
        second, first = np.sort(outcomes[0])[-2:]
        assert first - second > 20 * np.abs(outcomes[0] - outcomes[1]).max()


def test_prompts_on_one_document_differ_from_the_question_on(setting):
    one, other = setting.prompt(1, 1), setting.prompt(1, 2)
    assert one[: setting.document_tokens] == other[: setting.document_tokens]
    assert one[setting.document_tokens :] != other[setting.document_tokens :]
    assert Setting(setting.folder).document_tokens % Setting(setting.folder).piece == 0
