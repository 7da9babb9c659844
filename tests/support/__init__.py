"""What several tests need: checkpoints of every kind, judges, faults, processes to be watched."""
