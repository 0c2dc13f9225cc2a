"""Checks of the meaning of a training service, of any implementation: `drivetrain conformance-tinker URL`."""
