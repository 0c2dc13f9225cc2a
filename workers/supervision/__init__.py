"""The controller's side of worker processes: they are started, watched, restarted and ended here."""
