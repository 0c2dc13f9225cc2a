"""What controllers and model workers say to each other: messages, their bytes, and the transports that carry them."""
