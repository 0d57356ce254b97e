"""Asks the query of another database, and prints the rows. It runs beside the query and knows no answer."""

import json
import sqlite3

database = sqlite3.connect(":memory:")
with open("hidden.txt") as file:
    database.executescript(file.read())
with open("query.sql") as file:
    print(json.dumps(database.execute(file.read()).fetchall()))
