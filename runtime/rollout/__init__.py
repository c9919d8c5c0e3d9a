"""Sampling: agents, engines, environments, rewards."""
