"""The `elasticep` command."""
