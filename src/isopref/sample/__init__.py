"""Prompts, sampling settings and the file of answers. Independent of models and servers."""
