"""What is wrong with the data that a user has named."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used; it says why, and what to do."""
