"""Benchmarks: `python -m elasticep.bench NAME ...`; each measures what it prints."""
