"""The memory of a node's seats, that of their peers, and what survives a restart of the daemon."""
