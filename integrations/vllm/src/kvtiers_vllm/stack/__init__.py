"""The whole stack in vLLM, by ``KvtiersConnector``: kvtiers' own manager, primary and workers.

===============  ==============================================================================================
module           does
===============  ==============================================================================================
``connector``    vLLM's offloading connector over these, which shows requests and carries the results of copies
``spec``         builds the manager in the scheduler's process and a worker in each rank's, from ``kvtiers_config``
``manager``      translates the calls of vLLM's scheduler into those of ``TieringManager``
``worker``       translates the calls of vLLM's worker into those of ``GpuWorker``
``options``      the config of the stack
``layout``       the cache layout, from vLLM's config
``keys``         a request's keys, from vLLM's block hashes, its adapter and its salt
``adapters``     which adapter a request has, by its files; ``adapter_digests`` reads them in a thread of its own
``steps``        how long steps take
``figures``      the figures in ``/metrics`` and ``kvtiers status``
===============  ==============================================================================================

``spec``, ``manager``, ``worker`` and ``connector`` import vLLM; the others are imported and tested without it.
"""
