"""For tests, ours and yours: the oracle, the equations, tiny models, CPU ranks and the matrix of layouts."""
