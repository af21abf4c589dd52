"""The text engine's decoder against transformers, on tiny random checkpoints."""
