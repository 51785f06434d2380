"""What a file means: schedules, dispatches and plans of documents, with ranks and steps resolved.

schedules     a schedule: buffers, contracts, steps of moves as arrays
marks         keyed 64-bit marks of what is compared, drawn anew in each process
lengths       by what its blocks have lengths of their own, and who knows which
classes       what its buffers are made of: length of a block, sides of a matrix, element type
extents       the arrays of a call -> the lengths of blocks, and the sides of matrices
landing       which buffers of a schedule peers may put to themselves
held          what each yield of a schedule hands over
products      products of a schedule -> yields to a function of ours, on single chunks
rowwise       a schedule that ends in a row-wise function -> its moves, and that function
backward      how a gradient travels back
functions     what a schedule may compute but products
dispatches    a dispatch: tensors of rows and the routes they take
plans         a plan: shards of documents and the ranks that compute them
routes        where rows go: the runs of rows from each rank to each
bounds        the first rank or chunk that is not there
words         ranks and the values of loops, for messages
resolve       Syntax -> any of these
rounding      float32 values -> what is left of them when they have travelled in another element type
interpret     the oracle: what a schedule does to tensors, in numpy
simulate      the oracle of a dispatch: what it does to rows, in numpy
"""
