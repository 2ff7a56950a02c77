"""Runs, looked at from their folders: read, compared, and shown as a page. Needs no torch; changes nothing."""
