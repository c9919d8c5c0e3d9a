"""Moving bytes: MPI, the mailbox, weight channels."""
