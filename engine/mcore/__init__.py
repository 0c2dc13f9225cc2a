"""The Megatron-core engine."""

import logging
import warnings

# Of TransformerEngine and apex, which are missing and not needed, and of modules that are ours instead of its own.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
logging.getLogger("megatron").setLevel(logging.ERROR)
