"""Two prompts of 3,000 tokens for a vLLM on this machine: a new one, and one that is the same in every run.

Prompts and answers are token ids, for a server with ``--skip-tokenizer-init``::

    python examples/vllm/ask.py MODEL PORT
"""

import json
import random
import sys
import time
import urllib.request

NEW = [random.randrange(512) for _ in range(3000)]
SAME = [number * number % 511 for number in range(3000)]


def main() -> None:
    model, port = sys.argv[1:]
    for name, prompt in (("new", NEW), ("same", SAME)):
        began = time.monotonic()
        answer = ask(model, port, prompt)
        print(f"{name:>4} prompt: {time.monotonic() - began:.2f} s, {answer}")


def ask(model: str, port: str, prompt: list[int]) -> list[int]:
    """Return the tokens of the model's greedy answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        (choice,) = json.load(answer)["choices"]
    tokens: list[int] = choice["token_ids"]
    return tokens


if __name__ == "__main__":
    main()
