"""What this program was tested on, told by the README, `drivetrain --version --verbose` and runs on CUDA. Imports nothing."""

TESTED = "tested on CPUs, every layout in float32; no GPU has run this yet"
