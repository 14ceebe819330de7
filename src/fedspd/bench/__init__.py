"""What `fedspd bench` measures: ratios, each of two things that took turns in the same run, on the same machine."""
