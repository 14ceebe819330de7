"""Figures and pages from the records of a run."""
