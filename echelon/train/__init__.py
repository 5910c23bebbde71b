"""Training as a product: a config becomes a run, and a run is a folder."""
