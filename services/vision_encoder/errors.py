"""What stops the encoder's start. Errors of single requests are in shared/errors.py."""

from __future__ import annotations


class UnsupportedCheckpoint(ValueError):
    """The checkpoint is damaged or asks for something that is not implemented; the message says what is."""
