"""Programs for `environment.settings.command` that run environments of other projects. Each needs only its own project and nothing of this one, so
that it can also run, by its path, in another Python environment."""
