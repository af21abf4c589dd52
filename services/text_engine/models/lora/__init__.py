"""Low-rank adapters (LoRA): several on one model, each for the rows of its own requests."""
