"""A tokenizer of 512 tokens for the model of ``examples/vllm/tiny_model.py``: clients of others send text.

``python integrations/vllm/benchmarks/clients/tokenizer.py FOLDER``
"""

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def main() -> None:
    (folder,) = sys.argv[1:]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train(["README.md"], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    whole.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    whole.save_pretrained(folder)


if __name__ == "__main__":
    main()
