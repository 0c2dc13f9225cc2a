"""Images, video and audio of a row or a request: read, decoded, and processed as a model's encoders take them."""
