"""One file per algorithm; a file name is the algorithm name in a config."""
