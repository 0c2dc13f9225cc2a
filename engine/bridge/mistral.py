"""Mistral: Llama with a sliding window."""

from .llama import FAMILY as FAMILY
