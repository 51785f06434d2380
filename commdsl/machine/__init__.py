"""What there is to run on: topologies, cycles through their links, element types, this process's settings.

errors        what users can mend, as exceptions with one base
config        the environment -> Config
memory        the machine -> the bytes that a process may still take
resources     where the shipped folders lie
printable     text from outside -> text that a terminal does not obey
shortage      an OSError -> an error that says which limit is reached
private       paths -> folders and files that are this user's alone
unfinished    folders that are being filled -> kept while their process lives, removed after
cache         what something depends on -> what was made of it, kept from run to run
lazy          where names are -> modules that load what a name needs at its use
devices       the name of a device -> the GPU that it means
carriers      how data and flags travel between ranks, and what each way can do
topology      who can send to whom, how fast, through which ports
cycles        rings and Hamilton decompositions of its links
dtypes        element types and their reductions
"""
