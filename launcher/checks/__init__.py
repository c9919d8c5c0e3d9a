"""What can be found wrong with a run before it costs anything; `run` holds all of it together."""
