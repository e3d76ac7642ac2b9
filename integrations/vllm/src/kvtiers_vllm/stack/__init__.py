"""The whole stack under vLLM's ``OffloadingConnector``: kvtiers' own manager, primary and workers.

===============  ==============================================================================================
module           does
===============  ==============================================================================================
``spec``         what vLLM builds in its scheduler's process and in each worker's, from ``kvtiers_config``
``manager``      translates what vLLM's scheduler asks into calls of ``TieringManager``
``worker``       translates what vLLM's worker asks into calls of ``GpuWorker``
``connector``    what vLLM's connector has to do besides: show requests, carry what became of copies
``options``      the config that it is built from
``layout``       what a row holds, from vLLM's config
``keys``         a request's keys, from vLLM's block hashes, its adapter and its salt
``adapters``     which adapter a request has, by its files
``looks``        asks that in a thread of its own
``steps``        how long steps take
``figures``      what ``/metrics`` and ``kvtiers status`` say
===============  ==============================================================================================

``spec``, ``manager``, ``worker`` and ``connector`` import vLLM; the others are imported and tested without it.
"""
