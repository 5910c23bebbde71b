"""Starting ranks, and what a rank can know of itself before any communication."""
