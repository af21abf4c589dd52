"""What two services must agree on. Imports nothing of ours; only `torch_io` imports torch."""
