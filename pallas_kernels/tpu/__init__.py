"""Kernels for TPUs, on the packed layout."""
