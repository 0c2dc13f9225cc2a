"""How frames reach a model worker: standard input and output, or sockets."""
