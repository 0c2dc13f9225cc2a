"""`drivetrain data show`: what a trainer would learn from data."""
