"""Built-in recipes."""
