"""The user's config file."""
