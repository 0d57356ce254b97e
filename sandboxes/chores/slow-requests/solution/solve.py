import json
from statistics import median

times = {}
with open("access.log") as file:
    for line in file:
        fields = line.split()
        if len(fields) == 5 and fields[3].startswith("2"):
            times.setdefault(fields[2].partition("?")[0], []).append(int(fields[4]))
slow = [{"path": path, "requests": len(taken), "median_ms": median(taken)} for path, taken in times.items() if median(taken) > 300]
with open("slow.json", "w") as file:
    json.dump(sorted(slow, key=lambda entry: -entry["median_ms"]), file)
