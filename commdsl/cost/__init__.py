"""What a schedule costs on its machine, against the least that anything costs there, in numbers and pictures.

bounds        a contract -> the least time that any schedule needs for it
report        a schedule -> steps, bytes over links, time
timeline      a schedule -> a table, a row per step
draw, draw_plan   a picture of a schedule, of a plan
"""
