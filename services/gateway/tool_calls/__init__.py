"""Calls of tools in a model's text: read out of it as it is written, and the grammar that makes a model write them."""
