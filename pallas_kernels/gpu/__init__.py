"""What GPUs (and, for the layout, CPUs) use."""
