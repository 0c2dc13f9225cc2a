"""Whether a model's chat template is fit for conversations of several turns."""
