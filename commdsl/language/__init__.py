"""What is written: `.comm` text, its Syntax, and what is said about both.

records       frozen classes that cost little to make
source        a named text, and spans of it
codes         every code a diagnostic may have; `explain` has a page for each
diagnostics   what is wrong with a text, as data and as it is shown
kinds         the words that a text, its IR and its Plan share
syntax        what was written, a class per rule of the grammar
text          a file -> its text
parser        text -> Syntax
collection    a pause of the garbage collector, for work that only builds
parsed        the parser, which parses no text twice
print_expressions, print_syntax, print_dispatches, print_machines   a node -> its line of text
format        Syntax -> canonical text
highlight     the grammar -> patterns that colour a text, for Pygments by `pygments_lexer`, for editors as TextMate's
"""
