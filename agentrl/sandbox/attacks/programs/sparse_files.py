"""Creates sparse files whose size exceeds the disk, at paths that the host reads and in the snapshot.

kind: resources
seconds: 10
host: read_result_refused
"""

for number in range(8):
    try:
        with open("result" if number == 0 else f"sparse{number}", "wb") as file:
            file.truncate(1 << 40)
    except OSError:
        with open("result", "wb") as file:
            file.truncate(8 << 20)
        break
print("held: claimed")
