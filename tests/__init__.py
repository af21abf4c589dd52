"""Tests; importable, so that they can share the tiny checkpoints."""
