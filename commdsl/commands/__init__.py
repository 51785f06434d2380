"""The commands of the command line, one module each, imported when called.

Assumes `cli` has parsed the arguments. A command knows no click; it is a function that returns an exit code.

    cli           words -> one call of a command
    options       what the commands have in common, in click's terms
    arguments, lengths   words -> numbers, files, documents
    output        results -> text, colour, JSON, exit codes
    failures      what no file is to blame for -> words, an exit code
    budget        what is asked for -> what it would take
    jobs          files -> declarations to prove, and what came of each
    summary       what came of them -> lines, JSON
    listing       the shipped files -> a list
    check, run, show, plan, synth, compile, fmt, explain, tune, choice, cache, doctor, new   a command each
    lsp           what an editor asks, and `lsp`, the command that answers
    dumps, dump_plans, plan_view, timeline   what `show` shows
    promised, evaluated, handings   what `ensure` says of tensors, and of what yields hand over
    trial, visited, trial_rows, trial_keys   what `run` runs: schedules, their visits, rows by tables, rows by keys
    tables, report   by which plan, and what is said of it
    candidates    one's own schedules -> what `tune` measures
    products, cubins   what `compile` writes, and what it builds ahead of time
"""
