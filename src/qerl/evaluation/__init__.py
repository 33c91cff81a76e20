"""Evaluation of a model on verifiable tasks, the run folder, and the report of a run."""
