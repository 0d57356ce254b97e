"""Has the host pass on what a model may write, including half a surrogate pair, in every argument of a tool.

kind: protocol
seconds: 10
host: odd_arguments
"""

with open("\udcff", "w") as file:
    file.write("a name that is no UTF-8")
print("held: named")
