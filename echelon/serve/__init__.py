"""Inference: one persistent engine, in whose every step all live requests share (Flover's temporal fusion)."""
