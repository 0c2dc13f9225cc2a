"""The Megatron-core engine."""

import logging
import warnings

# Of TransformerEngine and apex, which are missing and not needed, and of modules that are ours instead of its own.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
# Its schedule asks for the gradient of what one stage hands to the next.
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
logging.getLogger("megatron").setLevel(logging.ERROR)
