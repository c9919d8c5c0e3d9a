"""One file per model family, named like its Hugging Face `model_type`: its TransformerConfig and its table of names."""
