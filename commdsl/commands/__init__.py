"""The commands of the command line, one module each, imported when called.

Assumes `cli` has parsed the arguments. Does not know click; a command is a function that returns an exit code.

    cli           words -> one call of a command
    arguments, lengths   words -> numbers, files, documents
    output        results -> text, colour, JSON, exit codes
    jobs, dispatch_jobs   files -> proofs to make
    check, run, show, plan, compile, fmt, explain, tune, choice, doctor, new   a command each
    dumps, show_dispatches, show_plans, plan_view   what `show` shows
    trial, report   what `run` runs and says
    products      what `compile` writes
"""
