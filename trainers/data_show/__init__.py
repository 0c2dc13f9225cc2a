"""`drivetrain data show`: how a trainer would read data."""
