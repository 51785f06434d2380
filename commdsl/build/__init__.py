"""What becomes text, and text that becomes something to run.

emit          Plan -> the text of its kernel
calls         the phases of a role -> the calls that its lanes make, in order
cache         what a build depends on -> the folder of its result, built once
nvrtc         text -> cubin, without a GPU
host          text -> a library for this processor
arena         the memory that the ranks of a host run share
host_run      a Plan and inputs -> outputs, on host ranks
"""
