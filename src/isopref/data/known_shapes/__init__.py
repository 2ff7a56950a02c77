"""The shapes that preference data comes in, each one class; registry.py lists them."""
