"""Lets the host say what a model may write, half a surrogate pair included, in every argument that a tool hands on.

kind: protocol
seconds: 10
host: odd_arguments
"""

with open("\udcff", "w") as file:
    file.write("a name that is no UTF-8")
print("held: named")
