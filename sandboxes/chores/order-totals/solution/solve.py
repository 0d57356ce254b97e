"""Writes the program and nothing else."""

PROGRAM = """import csv, json, sys
from collections import defaultdict
from decimal import Decimal

totals = defaultdict(Decimal)
with open(sys.argv[1], newline="") as file:
    for row in csv.DictReader(file):
        quantity = row["quantity"].strip()
        if quantity.isdigit() and int(quantity) > 0:
            totals[row["customer"].strip().lower()] += int(quantity) * Decimal(row["price"].strip().replace(",", "."))
with open("totals.json", "w") as file:
    json.dump({name: round(float(total), 2) for name, total in totals.items()}, file)
"""

with open("totals.py", "w") as file:
    file.write(PROGRAM)
