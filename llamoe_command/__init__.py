"""The `llamoe` command.

It stands beside the package `llamoe`, whose import takes seconds: options are parsed, and help and mistakes are shown,
before that. Reading order: printing, options, app (how a command is declared), write_commands, read_commands, page (the
page of `llamoe chat`), chat_command, doctor_command, cli.
The functions that the other commands call are in `llamoe.conversion`.
"""
