"""The reference's log-probabilities, computed once and cached on disk by content."""
