"""Executes a scheduled batch on a device: batch tensors, KV cache, image rows, sampling."""
