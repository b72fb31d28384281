"""The `llamoe` command.

It stands beside the package `llamoe`, whose import takes seconds: options are parsed, and help and mistakes are shown,
before that. Reading order: printing, options, cli. The functions that the commands call are in `llamoe.conversion`.
"""
