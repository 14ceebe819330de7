"""What every other package builds on: keys, graphs, blocks, exchanges, learners and errors."""
