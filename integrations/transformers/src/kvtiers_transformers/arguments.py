"""The arguments of a ``generate`` call: whether the cache may serve it, and why not.

All that could change the KV of a prompt, or needs a cache of its own, is refused by not being on a list: an option that
a later release adds is not served before it is added.
"""

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["left_padding", "problem_of"]

_NEVER_IN_KV = {
    # lengths and ends
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping", "max_time", "stop_strings",
    "stopping_criteria", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id", "exponential_decay_length_penalty", "length_penalty",
    # which token comes next, given the logits
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "renormalize_logits", "remove_invalid_values",
    "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "watermarking_config", "logits_processor",
    "prefix_allowed_tokens_fn",
    # the form of the result
    "output_scores", "output_logits", "return_dict_in_generate", "streamer", "tokenizer",
    # of a config: where it came from
    "transformers_version", "_from_model_config", "disable_compile",
    # looked at by themselves
    "attention_mask", "generation_config",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (True,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "num_beam_groups": (1,),
    "guidance_scale": (1, 1.0),
    "diversity_penalty": (0, 0.0),
    "penalty_alpha": (0, 0.0),
    "encoder_repetition_penalty": (1, 1.0),
    "encoder_no_repeat_ngram_size": (0,),
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",),
    "assistant_confidence_threshold": (0.4,),
    "assistant_lookbehind": (10,),
    "target_lookbehind": (10,),
}
"""Values, besides None and False, with which an option does nothing."""


def problem_of(generation_config: Any, input_ids: Any, arguments: Mapping[str, Any]) -> str:
    """Return why the cache cannot serve a call of ``generate``; "" if it can. ``generation_config``: the model's."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or not len(input_ids):
        return "input_ids is no tensor of [prompts, tokens]"
    given = arguments.get("generation_config")
    chosen = given if given is not None else generation_config
    options = dict(chosen.to_diff_dict()) if chosen is not None else {}
    if given is None and options.get("cache_implementation") == "hybrid":
        del options["cache_implementation"]  # generate() ignores this default of some models, too
    for name, value in {**options, **arguments}.items():
        if name not in _NEVER_IN_KV and not _is_neutral(name, value):
            return f"{name} is given, with which a prompt's KV may be another one, or has another cache"
    mask = arguments.get("attention_mask")
    if mask is None and _has_padding(input_ids, {**options, **arguments}):
        return "a prompt has the padding token in it, and no attention_mask is given"
    if mask is not None and left_padding(input_ids, mask) is None:
        return "attention_mask masks more than padding on the left"
    return ""


def _has_padding(input_ids: torch.Tensor, options: Mapping[str, Any]) -> bool:
    """Return whether ``generate`` would make a mask of its own from the tokens."""
    pad, ends = options.get("pad_token_id"), options.get("eos_token_id")
    ends = ends.tolist() if isinstance(ends, torch.Tensor) else ends
    if pad is None or pad in (ends if isinstance(ends, list | tuple) else [ends]):
        return False
    return bool((input_ids == pad).any())


def _is_neutral(name: str, value: Any) -> bool:
    if value is None or (value is False and name != "use_cache"):
        return True
    return isinstance(value, int | float | str) and value in _NEUTRAL.get(name, ())


def left_padding(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[int] | None:
    """Return how many tokens of each prompt are padding on its left; None if the mask is of another kind."""
    if mask is None:
        return [0] * len(input_ids)
    if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        return None
    bits = mask.cpu().to(torch.long)
    pads = (bits == 0).sum(1)
    expected = (torch.arange(bits.shape[1])[None] >= pads[:, None]).to(torch.long)
    if not torch.equal(bits, expected) or int(pads.max()) >= bits.shape[1]:
        return None
    return [int(pad) for pad in pads]
