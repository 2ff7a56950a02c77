"""Judges answers with a Python function, or a language model that compares two at a time. Independent of the config."""
