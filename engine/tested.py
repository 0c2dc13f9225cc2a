"""The platforms that this program was tested on. `drivetrain --version --verbose`, the README and runs on CUDA show it. Imports nothing."""

TESTED = (
    "tested on CPUs in float32, every engine, layout and trainer; parts have run on a single GPU, nothing on several GPUs yet"
)
