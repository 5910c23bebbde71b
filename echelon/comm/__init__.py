"""The process group, and all that moves bytes behind it."""
