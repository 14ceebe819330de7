"""The vocabulary that every other room speaks: keys, graphs, blocks, exchanges, learners, errors."""
