"""The run itself: what every rank executes."""
