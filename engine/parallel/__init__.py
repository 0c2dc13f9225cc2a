"""Processes of a parallel layout: the topology, its process groups, collectives over them, and how a process ends."""
