"""The embedded engine: a small inference server that speaks the dialect of SGLang, for CPUs and for exact repeats."""
