"""Strategies: each takes a plain model and a mesh of the layout, works on the model from outside, and returns it."""
