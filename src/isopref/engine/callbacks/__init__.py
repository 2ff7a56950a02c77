"""Callbacks of OLMo-core's Trainer, one module each."""
