"""The `llamoe` command.

Importing `llamoe` takes seconds. So the command is a package of its own, which shows help and errors in options first.

Reading order: printing, options, app (how a command is declared), write_commands, read_commands, page (the page of
`llamoe chat`), chat_command, doctor_command, cli. The commands for checkpoints call functions of `llamoe.conversion`.
"""
