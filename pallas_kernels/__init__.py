"""Paged attention: the oracle, and one form of it for each kind of device. Imports jax and itself, never jaxpaged."""
