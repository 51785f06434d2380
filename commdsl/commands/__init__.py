"""The commands of the command line, one module each, imported when called.

Assumes `cli` has parsed the arguments. Does not know click; a command is a function that returns an exit code.

    cli           words -> one call of a command
    arguments, lengths   words -> numbers, files, documents
    output        results -> text, colour, JSON, exit codes
    jobs          files -> declarations to prove, and what came of each
    summary       what came of them -> lines, JSON
    check, run, show, plan, compile, fmt, explain, tune, choice, doctor, new   a command each
    dumps, plan_view   what `show` shows
    trial, visited, trial_rows, trial_keys   what `run` runs: schedules, their visits, rows by tables, rows by keys
    tables, report   by which plan, and what is said of it
    products      what `compile` writes
"""
