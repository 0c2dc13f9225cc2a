"""The processes of a parallel layout: topology, process groups, collectives over them, and process exit."""
