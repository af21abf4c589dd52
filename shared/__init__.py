"""What two services must agree on. Imports nothing of ours.

The gateway, which must not need torch, keeps off the modules that import it: `cuda_capture`, `device`, `row_codec`,
`torch_io`.
"""
