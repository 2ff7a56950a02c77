"""Tensor operations with an eager twin each."""
