"""What this program was tested on. The README, `drivetrain --version --verbose` and runs on CUDA say it. Imports nothing."""

TESTED = "tested on CPUs, every layout in float32; in parts on one GPU, on several not yet"
