"""Processes that a program forks, gives work and kills: for rewards, for programs of a model, for tokenizing."""
