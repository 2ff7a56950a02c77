"""What a run will take, before it runs: memory, time and communication from lengths and the model's shape."""
