"""Pixels to what a tower takes, one file per kind of image processor. Runs in decode workers: no torch in here."""
