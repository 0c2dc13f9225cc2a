"""The protocol between controllers and model workers: messages, their encoding, and the transports that carry them."""
