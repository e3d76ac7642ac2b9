"""KV events: which blocks are where, for routers, published as vLLM publishes them."""
