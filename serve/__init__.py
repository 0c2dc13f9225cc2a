"""An HTTP service for a model: completions, chats and embeddings, as clients of OpenAI's interface expect them."""

# This import fails if the repository root is on sys.path and this package is imported as a top-level one.
from .. import __version__ as __version__
