"""Measurements behind ``qerl bench``: rollouts and kernels, each beside its ceiling and a check of its results."""
