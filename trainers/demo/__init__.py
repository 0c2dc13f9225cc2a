"""`drivetrain demo`: training a tiny model on embedded tasks."""
