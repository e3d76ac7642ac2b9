"""Questions about a long document, with transformers and without a server: the first answer pays for the document once.

    pip install ./core ./integrations/transformers ./plugins/fs_tier "transformers>=5.24" torch matplotlib
    python examples/transformers/long_document.py --document README.md --plot first_tokens.png
    python examples/transformers/long_document.py --document README.md                  # again: another process

`--random` takes a small model on random weights and bytes for tokens: nothing is downloaded, and the answers are noise.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvtiers_transformers import PrefixCache

QUESTIONS = [
    "What is this document about, in one sentence?",
    "Which three points matter most?",
    "What does it leave open?",
]


class Bytes:
    """A tokenizer for the random model: a byte is a token."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, torch.Tensor]:
        """Return the messages' bytes."""
        text = "".join(f"[{message['role']}] {message['content']}\n" for message in messages)
        return {"input_ids": torch.tensor([list(text.encode())])}

    def decode(self, ids: torch.Tensor, **_: Any) -> str:
        """Return letters."""
        return "".join(chr(32 + int(token) % 95) for token in ids)


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model and its tokenizer."""
    if not options.random:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        return AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").to(options.device).eval(), tokenizer
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=1 << 16, bos_token_id=None, eos_token_id=None, **sizes)
    return LlamaForCausalLM(config).to(options.device).eval(), Bytes()


def ask(
    by: Any, tokenizer: Any, messages: list[dict[str, str]], tokens: int, device: str
) -> tuple[str, float, float, int]:
    """Return the answer, the seconds until its first token and until its last one, and the prompt's length."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = prompt["input_ids"].to(device)
    first: list[float] = []

    def at_first_token(*_: Any) -> bool:
        first.append(time.perf_counter())
        return False

    begin = time.perf_counter()
    out = by.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=[at_first_token],
    )
    end = time.perf_counter()
    answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return answer, first[0] - begin, end - begin, ids.shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--random", action="store_true", help="a small model on random weights, without a download")
    parser.add_argument("--document", type=Path, default=Path(__file__), help="a text file (this one)")
    parser.add_argument("--tiers", default="", help="a tiers.yaml (a directory, see --cache)")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "kvtiers", help="where KV is kept")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, help="write a plot of the first tokens' times here (needs matplotlib)")
    options = parser.parse_args()

    model, tokenizer = load(options)
    directory = {"type": "fs", "path": str(options.cache), "capacity": "20GiB"}
    config = options.tiers or {"version": 1, "primary": {"capacity": "1MiB"}, "secondary": [directory]}
    document = options.document.read_text(encoding="utf-8")
    seconds: dict[str, list[float]] = {"without a cache": [], "with kvtiers": []}
    with PrefixCache(config, model, tokenizer, load="always") as cache:  # to compare, even where computing is faster
        messages = [{"role": "system", "content": f"Answer from this document.\n\n{document}"}]
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            alone, slow, _, length = ask(model, tokenizer, messages, options.tokens, options.device)
            answer, quick, whole, _ = ask(cache, tokenizer, messages, options.tokens, options.device)
            messages.append({"role": "assistant", "content": answer})
            seconds["without a cache"].append(slow)
            seconds["with kvtiers"].append(quick)
            print(f"\n> {question}\n{answer.strip()}")
            print(f"  {length} tokens; an answer after {quick:.2f} s ({slow:.2f} s without), ended at {whole:.2f} s")
            print(f"  the same answer as without: {answer == alone}")
            cache.flush()  # for the plot's sake: a chat needs no such wait
        stats = cache.stats()
    print(f"\n{stats['loaded_tokens']} of {stats['prompt_tokens']} prompt tokens were loaded")
    if options.plot:
        plot(seconds, options.plot)


def plot(seconds: dict[str, list[float]], path: Path) -> None:
    """Draw the seconds to the first token of each question's answer."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    for index, (name, values) in enumerate(seconds.items()):
        axes.bar([place + (index - 0.5) * 0.4 for place in range(len(values))], values, 0.38, label=name)
    axes.set_xticks(range(len(QUESTIONS)), [f"question {number}" for number in range(1, len(QUESTIONS) + 1)])
    axes.set_ylabel("seconds to the first token")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"{path} has the plot")


if __name__ == "__main__":
    main()
