"""The tables and figures of the FedSPD paper as experiments that one command repeats."""
