"""kvtiers in vLLM.

===============  ==============================================================================================
module           does
===============  ==============================================================================================
``plugin``       registers every installed tier, and the whole stack, with each of vLLM's processes at its start
``switch``       ``KVTIERS_CONFIG``: the whole stack without an argument of vLLM's
``compat``       the functions of vLLM's that kvtiers wraps, all of them, and whether this release has them
``engine``       the engine that is being built, and the link to its core
``stack``        the whole stack: kvtiers' own manager, primary and workers under kvtiers' connector
``own_tiering``  a kvtiers tier as one of vLLM's own secondary tiers
``never_raise``  keeps kvtiers' exceptions out of vLLM's step
``identity``     which model's KV this is, from vLLM's own config
``weights``      which weights these are: a commit, a digest, or random
``releases``     the differences between releases of vLLM
``cli``          ``kvtiers vllm-config``
===============  ==============================================================================================

Only ``own_tiering.tier``, and in ``stack`` what it names, import vLLM at their top; all others are imported and tested
without it.
"""
