"""Launching: from a config file to a job and back. Imports no torch, numpy or mpi4py."""
