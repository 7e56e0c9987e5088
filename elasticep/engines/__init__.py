"""Thin adapters between a serving engine's MoE blocks and an exchange."""
