"""Kernels, one folder per op: checks and choice of path, the torch reference, the Triton kernels."""
