"""What a schedule costs on its machine, against the least that anything costs there, in numbers and pictures.

demand        contracts -> values, who contributes to them and who wants them
graph         a machine -> what can flow between its ranks
flows         both -> the strongest cut, or the time of the best flows
bounds        a contract -> the least time that any schedule needs for it
waits         what steps move -> the longest chain of moves that wait for each other
report        a schedule -> steps, bytes over links, time
timeline      a schedule -> a table, a row per step
profile       time stamps of a call -> computation, communication, what of the call is exposed
bars          times of products and of what travels -> two lines of a terminal
visits        a schedule with yields -> how long it takes beside what its visits compute
visitors      a schedule with yields -> a table, a row per visit
routes        a schedule -> who hands on to whom: its cycles, its shifts
canvas        what pictures are drawn on
draw_machine  a machine -> a picture: a circle, a mesh, a torus
draw, draw_plan, draw_routes   a picture of a schedule, of a plan, of the cycles of a rotation
"""
