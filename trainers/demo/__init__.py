"""The command `drivetrain demo`, which trains a tiny model on built-in toy tasks."""
