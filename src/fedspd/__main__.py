"""`python -m fedspd` is the command `fedspd`."""

from fedspd.cli.main import main

main()
