"""The controller's side of worker processes: starts, monitors, restarts and ends them."""
