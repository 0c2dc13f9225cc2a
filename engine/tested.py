"""The platforms that this program was tested on. `drivetrain --version --verbose`, the README and runs on CUDA show it. Imports nothing."""

TESTED = "every engine, layout and trainer is tested on CPUs in float32; parts have run on a single GPU, and nothing has run on several GPUs"
