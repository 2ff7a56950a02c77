"""The reference's log-probabilities, computed once and kept on disk under a key of content."""
