"""Turns the command line into a language server: an editor asks over standard input and output, this answers.

Assumes the extra `lsp` (pygls). These are the only modules that import it.

    serve       the command
    session     the texts that are open, and their diagnostics
    answers     the questions of an editor
    checking    a text -> what `commdsl check` says of it, in a process of its own; a newer text stops it
    positions   offsets of a text <-> the lines and columns of an editor
    documents   a text -> what is known of it without a proof: its syntax, what its names mean, its outline
    proposals   the beginning of a text -> what may be written next
"""
