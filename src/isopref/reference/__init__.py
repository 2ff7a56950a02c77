"""Log-probabilities of the reference model."""
