"""The proofs that the project does what its documents say."""
