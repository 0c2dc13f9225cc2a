"""Training as a service: the HTTP protocol of Tinker's client, for many users with adapters of their own on one model."""
