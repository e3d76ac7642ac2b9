"""The whole stack in vLLM, by ``KvtiersConnector``: kvtiers' own manager, primary and workers.

===============  ==============================================================================================
module           does
===============  ==============================================================================================
``connector``    vLLM's offloading connector over these, which shows requests and carries what became of copies
``spec``         what it builds in its scheduler's process and in each worker's, from ``kvtiers_config``
``manager``      translates what vLLM's scheduler asks into calls of ``TieringManager``
``worker``       translates what vLLM's worker asks into calls of ``GpuWorker``
``options``      the config that it is built from
``layout``       what a row holds, from vLLM's config
``keys``         a request's keys, from vLLM's block hashes, its adapter and its salt
``adapters``     which adapter a request has, by its files; ``adapter_digests`` looks in a thread of its own
``steps``        how long steps take
``figures``      what ``/metrics`` and ``kvtiers status`` say
===============  ==============================================================================================

``spec``, ``manager``, ``worker`` and ``connector`` import vLLM; the others are imported and tested without it.
"""
