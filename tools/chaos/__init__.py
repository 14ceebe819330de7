"""Real peers under real faults: what docs/reliability.md quotes."""
