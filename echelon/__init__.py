"""Echelon: MPI-driven deep learning on the PyTorch that people already have.

Importing this package makes the backend `echelon` known to `torch.distributed`. Once Echelon is installed, `import
torch` alone does that too, through PyTorch's `torch.backends` entry point.
"""

from echelon.comm.torch_compat import register

__version__ = "0.1.0"
__all__ = ["__version__"]

register()
