"""Programs for `environment.settings.command`: environments of other projects. Each needs its own project and nothing of this one, so that it can also
run, by its path, in another Python environment."""
