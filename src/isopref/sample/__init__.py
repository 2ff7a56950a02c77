"""Answers of models to prompts: what is asked, how, and the file of answers. Knows no model and no server."""
