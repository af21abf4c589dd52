"""What two services must agree on. Imports nothing of ours; only `device` and `torch_io` import torch."""
