"""Conformance checks for any implementation of the training protocol: `drivetrain conformance-tinker URL`."""
