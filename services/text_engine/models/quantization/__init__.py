"""Quantized checkpoints: one module for each family of formats, all read into `GroupedWeight`."""
