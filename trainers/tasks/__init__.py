"""The built-in toy tasks: data, tokenizer and untrained model of a tiny run, generated from a seed."""
