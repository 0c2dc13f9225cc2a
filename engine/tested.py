"""The platforms that this program was tested on. `drivetrain --version --verbose`, the README and runs on CUDA show it. Imports nothing."""

TESTED = "tested on CPUs, every layout in float32; in parts on one GPU, on several not yet"
