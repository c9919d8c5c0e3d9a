"""Tools that look at a run from outside."""
