"""Images, video and audio of a row or a request: reading, decoding, and processing for a model's encoders."""
