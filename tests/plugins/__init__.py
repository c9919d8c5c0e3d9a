"""Plugins outside the tree, found by dotted path, that go wrong on purpose."""
