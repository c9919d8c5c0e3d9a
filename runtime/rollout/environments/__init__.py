"""One file per environment; a file name is `environment` in a data set."""
