"""Shared helpers of the tests: checkpoints of every kind, judges, faults, and processes that are watched."""
