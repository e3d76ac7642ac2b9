"""The log of a release's own request logger, as ``vllm serve --enable-log-requests`` has it at the level DEBUG.

Usage: request_log.py FILE REQUESTS. ``REQUESTS``: JSON, of each request its text and its token ids, either may be null.
The log is written to FILE, and the release printed.
"""

import json
import os
import sys

os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"  # vLLM reads it when it is imported


def main() -> None:
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    out = os.dup(1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import vllm
    from vllm import logger
    from vllm.entrypoints.serve.utils.request_logger import RequestLogger
    from vllm.sampling_params import SamplingParams

    if hasattr(logger, "configure_logging"):  # a server does this; older releases do it when they are imported
        from vllm.config.logging import LoggingConfig

        logger.configure_logging(LoggingConfig())
    requests = RequestLogger(max_log_len=None)
    for number, (text, ids) in enumerate(json.loads(sys.argv[2])):
        requests.log_inputs(f"cmpl-{number}", text, ids, None, SamplingParams(stop=["Received request "]), None)
        requests.log_outputs(f"cmpl-{number}", text or "", ids, "stop")
    os.write(out, f"{vllm.__version__}\n".encode())


main()
