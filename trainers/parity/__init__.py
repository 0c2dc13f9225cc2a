"""`drivetrain parity`: engines and layouts compared with plain Hugging Face."""
