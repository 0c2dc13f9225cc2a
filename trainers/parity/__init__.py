"""The command `drivetrain parity`, which compares engines and layouts with plain Hugging Face."""
