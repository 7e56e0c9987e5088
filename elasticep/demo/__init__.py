"""A small model served by a real cluster, with a kill in the middle of decoding."""
