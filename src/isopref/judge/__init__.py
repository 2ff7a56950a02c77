"""Judgements of answers: by a Python function, or by a language model that compares two at a time. Knows no config."""
