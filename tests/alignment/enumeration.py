"""All alignments of a target, one by one."""

import itertools


def alignments(frames, classes, target, blank):
    """All sequences of classes that are a target once repetitions and then blanks are taken out."""
    for labels in itertools.product(range(classes), repeat=frames):
        if [label for label, _ in itertools.groupby(labels) if label != blank] == target:
            yield list(labels)


def positions(labels, blank):
    """The number of the label that each frame has, None for blanks."""
    number, numbers = -1, []
    for frame, label in enumerate(labels):
        number += label != blank and (frame == 0 or labels[frame - 1] != label)
        numbers.append(None if label == blank else number)
    return numbers
