"""Echelon: MPI-driven deep learning on the PyTorch that people already have.

Where Echelon is installed, `import torch` makes the backend `echelon` known to `torch.distributed`, through PyTorch's
`torch.backends` entry point. Importing this package does the same where that entry point is missing or switched off.
"""

import os
from importlib.metadata import entry_points

from echelon.comm.torch_compat import BACKEND, register

__version__ = "0.1.0"
__all__ = ["__version__"]


def _torch_will_register() -> bool:
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    return autoload and BACKEND in entry_points(group="torch.backends").names


if not _torch_will_register():
    register()
