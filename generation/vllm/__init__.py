"""Generation by vLLM: in this process, or by a server of its own."""
