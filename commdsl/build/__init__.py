"""What becomes text, and text that becomes something to run.

emit          Plan -> the text of its kernel
emit_dispatch   a dispatch -> what is launched for it, and the text of its kernel
cache         what a build depends on -> the folder of its result, built once
nvrtc         text -> cubin, without a GPU
host          text -> a library for this processor
arena         the memory that the ranks of a host run share
host_run      a Plan and inputs -> outputs, on host ranks
"""
