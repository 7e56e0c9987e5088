"""Who is alive: processes, locks, and ranks that wait for each other."""
