"""The Megatron-core engine."""

import logging
import warnings

# Of TransformerEngine and apex, which are missing and not needed, and of modules that are ours instead of its own.
warnings.filterwarnings("ignore", module=r"megatron\.")
logging.getLogger("megatron").setLevel(logging.ERROR)
