"""Speculative decoding: guesses at coming tokens, from whom, and how many of them a step verifies. No tensors."""
