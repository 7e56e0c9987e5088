"""Expert weights that a daemon keeps: arenas, what fills them, and backups for other nodes."""
