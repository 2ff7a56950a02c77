"""Estimates of a run's memory, time and communication, from the data's lengths and the model's shape."""
