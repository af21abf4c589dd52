"""Faults on purpose: a real system under steady load, one thing broken at a time, and a verdict on what came of it."""
