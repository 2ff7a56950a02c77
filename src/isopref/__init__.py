"""Preference tuning of language models: the global batch defines the math, the layout never changes it."""

__version__ = "0.1.0"
