"""The command `drivetrain demo`, which trains a tiny model on embedded tasks."""
