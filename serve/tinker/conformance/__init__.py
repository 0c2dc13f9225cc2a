"""Checks of what a training service means, whoever has written it: `drivetrain conformance-tinker URL`."""
