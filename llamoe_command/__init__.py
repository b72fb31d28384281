"""The `llamoe` command.

It is a package of its own, because importing `llamoe` takes seconds: options are parsed, and help and mistakes in
options are shown, before that.

Reading order: printing, options, app (how a command is declared), write_commands, read_commands, page (the page of
`llamoe chat`), chat_command, doctor_command, cli. The commands for checkpoints call functions of `llamoe.conversion`.
"""
