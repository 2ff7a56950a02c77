"""The oracle, tiny models and a spawner of CPU ranks: what tests are made of."""
