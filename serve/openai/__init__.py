"""An OpenAI-compatible HTTP API: completions, chats and embeddings."""
