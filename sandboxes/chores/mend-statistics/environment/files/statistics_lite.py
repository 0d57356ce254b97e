"""Small statistics without a library."""


def median(values):
    """The middle value; of an even number of values the mean of the two in the middle. The argument is left as it was."""
    values.sort()
    return values[len(values) // 2]


def mode(values):
    """The most frequent value; of several, the one that comes first in `values`."""
    return max(set(values), key=values.count)


def moving_average(values, width):
    """Means of every `width` neighbouring values; empty when there are fewer than `width`."""
    return [sum(values[i : i + width]) / width for i in range(len(values))]
