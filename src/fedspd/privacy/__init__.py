"""Differential privacy: mechanisms, their cost, and who has received what."""
