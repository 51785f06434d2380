"""What becomes text, and text that becomes something to run.

constants     a Plan of rows -> the numbers that its kernel is built with
emit          Plan -> the text of its kernel
headers       the headers that kernels include -> the folder, and one digest
built         kernels that were built ahead of time -> the cubin to load
calls         the phases of a role -> the calls that its lanes make, in order
nvrtc         text -> cubin, without a GPU
host          text -> a library for this processor
merge         what is to be merged -> the text and the argument of the kernel that does it
matmul        a product of matrices -> the text, the table and the argument of its kernel
task_table    the tasks of a launch, in order -> the tables that their kernel has of them
tilings       the size of a product of matrices -> the tiling that takes the least time
arena         the memory that the ranks of a host run share: guards, and a pattern where results go
host_ranks    a Plan and the arguments of its calls -> what they leave there, on host ranks
host_run      a Plan of chunks and tensors -> results
host_rows     a dispatch's Plan, tables and rows -> results
host_keys     the Plans of a dispatch by keys, keys and rows -> results
"""
