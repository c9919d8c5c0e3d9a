"""Training: roles, losses, optimizer steps, checkpoints."""
