"""Helpers that are shipped: for our tests, the demo, and the tests of those who use elasticep."""
