"""From a config to a run: the only place that knows both. Everything below takes plain arguments."""
