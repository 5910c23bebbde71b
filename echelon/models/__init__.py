"""Models in plain PyTorch, built from parts that can be replaced. They know nothing of parallelism."""
