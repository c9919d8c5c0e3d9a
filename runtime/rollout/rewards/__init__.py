"""One file per reward; a file name is `reward` in a data set."""
