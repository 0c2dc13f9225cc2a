"""The routes of OpenAI's interface: completions, chats and embeddings over HTTP."""
