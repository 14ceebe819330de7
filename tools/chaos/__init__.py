"""Fault injection into networks of real peers, whose results docs/reliability.md quotes."""
