"""Earliest arrivals for a growing number of ferries; connections in order of departure, so one pass serves each number."""


def earliest(connections, start, end, ready):
    if start == end:
        return [ready, [start]]
    ordered = sorted(connections, key=lambda c: (c[2], c[3]))
    best = {start: (ready, (start, None))}
    found = None
    reached = dict(best)
    while reached:
        following = {}
        for origin, target, departs, arrives in ordered:
            if origin in reached and reached[origin][0] <= departs:
                at = min(following.get(target, (float("inf"),))[0], best.get(target, (float("inf"),))[0])
                if arrives < at:
                    following[target] = (arrives, (target, reached[origin][1]))
        best.update(following)
        if end in following:
            found = following[end]
        reached = following
    if found is None:
        return None
    way, node = [], found[1]
    while node:
        way.append(node[0])
        node = node[1]
    return [found[0], way[::-1]]
