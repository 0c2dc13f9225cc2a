"""Generation with vLLM: in this process, or with a separate server."""
