"""Which schedule runs for a size, how tuned, and the measurements that say so.

search_space  a collective -> the candidates there are
search        their times -> the rows of a table
selection     a table and a size -> the candidate to run, and why; `tables` are shipped
"""
