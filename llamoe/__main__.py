"""`python -m llamoe`: the same as the command `llamoe`."""

from llamoe_command.cli import main

main()
