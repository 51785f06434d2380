"""The commands of the command line, one module each, imported when called.

Assumes `cli` has parsed the arguments. Does not know typer; a command is a function that returns an exit code.
"""
