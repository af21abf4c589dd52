"""The hot operations, each with a plain PyTorch twin in `reference`."""
