"""kvtiers in vLLM.

===============  ==============================================================================================
module           does
===============  ==============================================================================================
``plugin``       registers every installed tier, and the whole stack, with each of vLLM's processes at its start
``stack``        the whole stack: kvtiers' own manager, primary and workers under vLLM's connector
``tier``         a kvtiers tier as one of vLLM's own secondary tiers: the class that vLLM calls
``prefill``      how fast the engine computes, as far as a tier sees it
``driver``       what that class drives: the tier, its jobs' deadlines, its requests' waits; knows nothing of vLLM
``opening``      builds a driver from the options in vLLM's config
``region``       finds the file behind vLLM's memory, so that a tier host can map it
``nodes``        refuses an engine whose ranks lie on several hosts
``guard``        keeps what goes wrong here out of vLLM's step
``identity``     which model's KV this is, from vLLM's own config
``weights``      which weights these are: a commit, a digest, or random
``releases``     what changed between the releases of vLLM
===============  ==============================================================================================

Only ``tier``, and in ``stack`` what it names, import vLLM at their top; all others are imported and tested without it.
"""
