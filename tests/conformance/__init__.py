"""PyTorch's own tests for backends, run over Echelon and, as the reference, over Gloo."""
